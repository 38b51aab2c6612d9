"""What an exported model takes in onnxruntime against the same model in PyTorch, uncompiled, on processors.

Models have random weights: each comes from a run of one step over four images, through `hotloop`'s own export. Rounds
alternate: PyTorch, onnxruntime, PyTorch, ... ; a ratio is of one round's medians. Goal: 1.0 at the least, outputs
within 1e-4.
"""

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from PIL import Image
from record import Figure, publish

from hotloop import train_job
from hotloop.core.job_file import parse_job
from hotloop.core.machine import read_machine
from hotloop.export.check import compare, time_batch
from hotloop.export.exporting import Wanted, export
from hotloop.export.manifest import EAGER
from hotloop.export.predict import onnx_forward
from hotloop.export.source import Source, named_run, open_source
from hotloop.train.observer import Observer

_BATCHES = (1, 8, 32)


class Silent(Observer):
    """Shows nothing."""

    def on(self, event: object) -> None:
        pass


def trained(folder: Path, model: str, size: int) -> Source:
    """The model after a step."""
    for number in range(4):
        file = folder / f"images/{number % 2}/{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (size, size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(file)
    job = {
        "device": "cpu", "task": {"image_size": size}, "model": {"name": model}, "train": {"epochs": 1},
        "data": {"train": str(folder / "images"), "val": str(folder / "images"), "batch_size": 4, "workers": 0},
        "optimizer": {"learning_rate": 1e-6}, "log": {"tensorboard": False}, "run": {"dir": str(folder / model)},
    }  # fmt: skip
    train_job(parse_job(job, model), read_machine(), Silent())
    return open_source(*named_run(str(folder / model), folder), (), "auto", print)


def measured(folder: Path, model: str, size: int, rounds: int) -> Iterator[tuple[str, Any]]:
    """Ratios by batch, and the largest difference of two outputs."""
    source, out = trained(folder, model, size), folder / f"{model}.onnx"
    export(source, Wanted("onnx", out, check=False))
    forward = onnx_forward(out)
    yield "max_abs_error", compare(source, forward, "fp32", float("inf"), 4).max_abs_error
    for batch in _BATCHES:
        times = [
            (time_batch(EAGER, source, source.eager, batch), time_batch("onnxruntime", source, forward, batch))
            for _ in range(rounds)
        ]
        ratios = [eager.median_ms / other.median_ms for eager, other in times]
        yield (
            f"batch_{batch}",
            {
                "pytorch_ms": median(eager.median_ms for eager, _ in times),
                "onnxruntime_ms": median(other.median_ms for _, other in times),
                "times_as_fast": asdict(Figure.of(ratios, "x")),
            },
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="+", default=["resnet18", "resnet50", "vit_small_patch16_224"])
    parser.add_argument("--size", type=int, default=224, help="pixels")
    arguments = parser.parse_args()
    content: dict[str, Any] = {"goal": {"times_as_fast": 1.0, "max_abs_error": 1e-4}}
    for model in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            content[model] = dict(measured(Path(folder), model, arguments.size, arguments.rounds))
    publish("export", content, arguments.json)


if __name__ == "__main__":
    main()
