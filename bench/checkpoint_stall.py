"""What checkpoints cost a training: for how long it waits for each, and its speed with them against without.

Llama 3's 8B shapes with Adam on all GPUs of one host (FSDP2, bf16, one sequence of 8,192 tokens on each), a checkpoint
of 96 GB every 40 steps (`--every`), written beside the training. Speed is by the clock over the same steps of both
runs, saves included.

Goals: it waits at most 0.3 s; 0.99 of the tokens/s.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch
from record import Figure, add_device, publish


class Sizes:
    """What is trained: large on GPUs, tiny without."""

    def __init__(self, device: str, layers: int, every: int) -> None:
        tiny = device == "cpu"
        self.device = device
        self.ranks = 2 if tiny else torch.cuda.device_count()
        self.context, self.vocabulary = (32, 64) if tiny else (8192, 128_256)
        self.arguments = {"layers": layers}
        if tiny:
            self.arguments = {"layers": 2, "width": 64, "heads": 2, "kv_heads": 2, "hidden": 64}
        self.warm, self.every, self.saves = (4, 4, 3) if tiny else (15, every, 3)

    @property
    def steps(self) -> int:
        return self.warm + self.every * self.saves


def trained(sizes: Sizes, folder: Path, every: int, number: int) -> Path:
    """The directory of a run that saves so often."""
    run = folder / f"run-{number}-{every}"
    job = {
        "device": sizes.device,
        "parallel": "fsdp",
        "precision": "bf16" if sizes.device == "cuda" else "fp32",
        "task": {"name": "tokens", "context": sizes.context, "vocabulary": sizes.vocabulary},
        "data": {"train": str(folder / "tokens.npy"), "batch_size": sizes.ranks, "last_batch": "drop"},
        "model": {"name": "llama-3-8b", "arguments": sizes.arguments},
        "train": {"epochs": 1},
        "optimizer": {"name": "adamw", "learning_rate": 1e-5},
        "speed": {"compile": "blocks" if sizes.device == "cuda" else False},
        "ranks": {"processes": sizes.ranks, "restarts": 0},
        "checkpoint": {"every": f"{every} steps", "keep": 1, "background": True},
        "log": {"every": 1, "tensorboard": False},
        "run": {"dir": str(run)},
    }
    file = folder / "job.toml"
    file.write_text(tomli_w.dumps(job))
    command = [sys.executable, "-m", "hotloop", "train", str(file), "--json"]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    shutil.rmtree(run / "checkpoints")  # those of two runs need not fit the disk
    return run


def window_seconds(run: Path, first: int, last: int) -> float:
    """By the clock, from the end of a step to the end of another."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    times = {record["step"]: record["time"] for record in records if record["event"] == "step"}
    return float(times[last] - times[first])


def saves_of(run: Path, last: int) -> list[dict[str, Any]]:
    """While it trained: a run ends with one more, which is waited for."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [one for one in records if one["event"] == "checkpoint" and one["step"] < last]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_device(parser)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--layers", type=int, default=32, help="of 32: 16 on two GPUs are as much for each as 32 on four"
    )
    parser.add_argument(
        "--every", type=int, default=40, help="steps between saves; they must take longer than one takes to be written"
    )
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    sizes = Sizes(arguments.device, arguments.layers, arguments.every)
    stalls, wholes, ratios = [], [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        count = (sizes.steps + 1) * sizes.ranks * sizes.context + 1
        tokens = np.random.default_rng(0).integers(0, sizes.vocabulary, count)
        np.save(folder / "tokens.npy", tokens.astype(np.uint32 if sizes.vocabulary > 2**16 else np.uint16))
        for number in range(arguments.rounds):
            first, last = sizes.warm, sizes.steps - 1
            seconds = {every: trained(sizes, folder, every, number) for every in (sizes.every, 10**6)}
            with_saves = seconds[sizes.every]
            saves = saves_of(with_saves, last)
            stalls += [one["stalled_seconds"] for one in saves]
            wholes += [one["seconds"] for one in saves]
            took = [window_seconds(run, first, last) for run in (seconds[10**6], with_saves)]
            ratios.append(took[0] / took[1])
    content = {
        "ranks": sizes.ranks,
        "layers": sizes.arguments["layers"],
        "stall": Figure.of(stalls, "s").__dict__,
        "until_whole": Figure.of(wholes, "s").__dict__,
        "speed_with_saves": Figure.of(ratios, "of the speed without").__dict__,
    }
    if sizes.device == "cuda":
        publish("checkpoint_stall", content, arguments.json)
    else:
        print(json.dumps(content))


if __name__ == "__main__":
    main()
