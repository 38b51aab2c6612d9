"""How far `hotloop plan --measure` is off: the step that it times for some seconds, against a whole `hotloop train`.

Each case is timed as the command does it, then trained for some epochs, of which each after the first three gives one
figure. Goal: off by at most 3 % (median).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from plan_accuracy import Case, job_of, tiny
from record import Figure, add_device, of_this_source, record

from hotloop.tune.job_trials import step_seconds

CASES = (
    Case("resnet50", 256),
    Case("resnet152", 128, "tf32", compiled=False),
    Case("gpt2", 8, context=1024, compiled=False),
    Case("vit_base_patch16_224", 128),
    Case("gpt2", 32, context=1024),
)
STEPS_AN_EPOCH, EPOCHS, WARM_EPOCHS = 40, 7, 3


def measure(case: Case, device: str, folder: Path) -> dict[str, Any]:
    """Seconds of a step by both."""
    job = job_of(case, folder, device)
    samples = case.batch * (STEPS_AN_EPOCH if device == "cuda" else 1)
    if case.context:
        np.save(folder / "tokens.npy", np.zeros(samples * case.context + 1, np.uint16))
    else:
        np.savez(
            folder / "images.npz", images=np.zeros((samples, 224, 224, 3), np.uint8), labels=np.arange(samples) % 1000
        )
    few = step_seconds(job, os.environ)
    file, run = folder / "job.toml", folder / "run"
    raw = job.model_dump(mode="json", exclude_none=True)
    raw["train"]["epochs"] = EPOCHS
    raw["run"] = {"dir": str(run)}
    file.write_text(tomli_w.dumps(raw))
    subprocess.run([sys.executable, "-m", "hotloop", "train", str(file)], stdout=subprocess.DEVNULL, check=True)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    epochs = [case.batch / one["samples_per_second"] for one in records if one["event"] == "epoch"]
    whole = Figure.of(epochs[WARM_EPOCHS:], "s")
    return {"few": few, "whole": asdict(whole), "off": few / whole.median - 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    add_device(parser)
    parser.add_argument("--only", default="", metavar="TEXT", help="cases with this in their names")
    options = parser.parse_args()
    cases: dict[str, Any] = of_this_source("plan_steps").get("cases", {})
    for case in CASES:
        if options.only not in case.name:
            continue
        real = tiny(case) if options.device == "cpu" else case
        with tempfile.TemporaryDirectory() as folder:
            cases[case.name] = measure(real, options.device, Path(folder))
        print(f"{case.name}: {cases[case.name]}", file=sys.stderr, flush=True)
        off = [abs(one["off"]) for one in cases.values()]
        content = {"cases": cases, "median": statistics.median(off), "worst": max(off), "goal": {"median": 0.03}}
        if options.device == "cuda":
            record("plan_steps", content)
    print(json.dumps(content, indent=None if options.json else 2))


if __name__ == "__main__":
    main()
