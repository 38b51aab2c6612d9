"""What it costs a training to be watched: the time that `hotloop.core.live` takes in a step of 5 ms.

Steps are as in `hotloop train`: two phases, times added up, a sign of life; by the clock given a step is 5 ms, so that
a file is written in every 200th; and as in a script under `hotloop run`: what its backward and step take longer. Goal:
0.1 % of the step.
"""

import argparse
import os
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median

import torch
from record import Figure, publish

from hotloop.attach.live import PublishedScript
from hotloop.core.live import Publisher, live_folder

_STEP_SECONDS, _STEPS, _BLOCK = 0.005, 20_000, 1_000


class Clock:
    """One that moves by what a step takes."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def cost(folder: Path) -> float:
    """Share of a step."""
    clock = Clock()
    publisher = Publisher(folder, clock, way="run", job="train", run="/tmp/run", gpu="GPU-1")
    started = time.perf_counter()
    for step in range(_STEPS):
        publisher.enter("loading")
        publisher.enter("step")
        clock.now += _STEP_SECONDS
        publisher.stepped(_STEP_SECONDS, 0.0)
        publisher.beat(step)
    took = time.perf_counter() - started
    publisher.close()
    return took / _STEPS / _STEP_SECONDS


def backwards(loss: torch.Tensor, published: PublishedScript | None, clock: Clock) -> float:
    """Seconds of a step of nothing else."""
    started = time.perf_counter()
    for step in range(_BLOCK):
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        clock.now += _STEP_SECONDS
        if published:
            published.stepped(_STEP_SECONDS, 0.0, step)
    return (time.perf_counter() - started) / _BLOCK


def script_cost(folder: Path) -> float:
    """Share of a step: the median difference of short blocks that take turns, as one of 20 µs varies by some."""
    os.environ["HOTLOOP_LIVE"] = str(folder)
    weight = torch.zeros(1, requires_grad=True)
    optimizer, loss, clock = torch.optim.SGD([weight]), weight.sum(), Clock()
    differences = []
    for _ in range(_STEPS // _BLOCK):
        plain = backwards(loss, None, clock)
        published = PublishedScript(torch, weight.device, "run", folder, clock)
        published.optimizer = optimizer
        differences.append(backwards(loss, published, clock) - plain)
        published.close()
    return median(differences) / _STEP_SECONDS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=21)
    arguments = parser.parse_args()
    usual = live_folder()
    assert usual
    with tempfile.TemporaryDirectory(dir=usual.parent) as folder:
        shares = [cost(Path(folder)) for _ in range(arguments.rounds)]
        of_scripts = [script_cost(Path(folder)) for _ in range(arguments.rounds)]
    content = {
        "goal": 0.001,
        "share_of_step": asdict(Figure.of(shares, "of a 5 ms step")),
        "share_of_a_scripts_step": asdict(Figure.of(of_scripts, "of a 5 ms step")),
    }
    publish("live_cost", content, arguments.json)


if __name__ == "__main__":
    main()
