"""How many batches filled ahead keep ranks computing that wait for the latest of them, with 3 and with 8.

Four processes on the CPU, one worker each; a step takes 50 ms, in which nothing computes. Samples take 0.65 of that
together, one in ten three times as long as others, and all vary by 30 %. A figure is the share of the time in which
steps are, from the 100th to the 500th of a run.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from record import Figure, publish
from torch import Tensor, nn
from training import of_event, records_of

import hotloop
from hotloop.data import loader

_RANKS, _BATCH, _STEP, _LOAD = 4, 4, 0.05, 0.65
_WARM, _STEPS = 100, 500
_AHEAD = "HOTLOOP_BENCH_AHEAD"

if ahead := os.environ.get(_AHEAD):  # in the processes that train, which import the task from here
    loader._AHEAD_OF_SEVERAL = int(ahead)


class Disturbed(hotloop.Dataset):
    """Samples that come late at times."""

    def __len__(self) -> int:
        return _RANKS * _BATCH * _STEPS

    def sample(self, index: int, random: np.random.Generator) -> dict[str, np.ndarray]:
        longer = max(0.5, 1 + 0.3 * random.standard_normal()) * (3 if random.random() < 0.1 else 1)
        time.sleep(longer * _STEP * _LOAD / 1.2 / _BATCH)
        return {"inputs": np.zeros(4, np.float32), "targets": np.zeros(1, np.float32)}

    def fingerprint(self) -> str:
        return "disturbed"


class Waiting(nn.Module):
    """A step that takes its time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(_STEP)
        y: Tensor = self.linear(x)
        return y


class Steady(hotloop.Task):
    """Four numbers to one."""

    def data(self, split: str) -> hotloop.Dataset | None:
        return Disturbed() if split == "train" else None

    def model(self) -> nn.Module:
        return Waiting()

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return (outputs - batch["targets"]).square().mean()


def share(ahead: int) -> float:
    """Of the time that a run's steps take, that in which they are not waited for."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job: dict[str, Any] = {
            "device": "cpu",
            "parallel": "ddp",
            "task": {"name": "batches_ahead:Steady"},
            "data": {"train": "none", "batch_size": _RANKS * _BATCH, "workers": 1, "last_batch": "drop"},
            "model": {"name": "waiting"},
            "train": {"epochs": 1},
            "ranks": {"processes": _RANKS, "restarts": 0},
            "checkpoint": {"every": "2 epochs"},
            "log": {"every": 50, "tensorboard": False},
            "run": {"dir": str(folder / "run")},
        }
        (folder / "job.toml").write_text(tomli_w.dumps(job))
        path = f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"
        environment = {**os.environ, "PYTHONPATH": path, _AHEAD: str(ahead), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "hotloop", "train", str(folder / "job.toml")]
        subprocess.run(command, check=True, timeout=300, capture_output=True, env=environment)
        times = {one["step"]: one["time"] for one in of_event(records_of(folder / "run" / "metrics.jsonl"), "step")}
    return float((_STEPS - _WARM) * _STEP / (times[_STEPS] - times[_WARM]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found: dict[int, list[float]] = {3: [], 8: []}
    for _ in range(arguments.rounds):
        for count, shares in found.items():
            shares.append(share(count))
            print(found, file=sys.stderr, flush=True)
    content = {str(count): vars(Figure.of(shares, "of the time")) for count, shares in found.items()}
    publish("batches_ahead", content, arguments.json)


if __name__ == "__main__":
    main()
