"""How long `hotloop plan` takes for an 8B model, as a whole process, and how much memory. Goals: 10 s, 4 GB.

For a short training, whose model is not compiled, and for a long one.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
from record import Figure, publish

CONTEXT = 8192
JOB = f"""
[task]
name = "tokens"
context = {CONTEXT}
vocabulary = 128256
[data]
train = "tokens.npy"
batch_size = 8
[model]
name = "llama-3-8b"
[optimizer]
name = "adamw"
learning_rate = 1e-4
"""
CASES = {
    "short, 8 GPUs": ["--gpus", "8", "--set", "train.epochs=1"],
    "long, 8 GPUs": ["--gpus", "8", "--set", "train.epochs=1000", "--samples", "1000000"],
}


def planned(folder: Path, options: list[str]) -> tuple[float, float]:
    """Seconds and GB of one process."""
    command = [sys.executable, "-m", "hotloop", "plan", "job.toml", "--card", "H200", "--json", *options]
    started = time.perf_counter()
    child = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - started
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0, f"{' '.join(command)} ended with {child.returncode}"
    return seconds, usage.ru_maxrss * 1024 / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--runs", type=int, default=7)
    arguments = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.toml").write_text(JOB)
        np.save(folder / "tokens.npy", np.zeros(64 * (CONTEXT + 1), np.uint16))
        for case, options in CASES.items():
            runs = [planned(folder, options) for _ in range(arguments.runs + 1)][1:]  # the first one fills caches
            seconds, memory = zip(*runs, strict=True)
            found[case] = {"seconds": asdict(Figure.of(list(seconds), "s")), "memory_gb": max(memory)}
    publish("plan_time", {"cases": found, "goals": {"seconds": 10.0, "memory_gb": 4.0}}, arguments.json)


if __name__ == "__main__":
    main()
