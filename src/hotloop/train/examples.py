"""Predictions on validation samples, written into the run for its report."""

import io
import json
from base64 import b64encode
from collections.abc import Sequence

from PIL import Image
from torch import Tensor

from hotloop.core.files import write_atomic
from hotloop.core.run import Run
from hotloop.tasks.task import Example


def write_examples(run: Run, examples: Sequence[Example]) -> None:
    """Write `examples.json`: wrong predictions first, pictures as PNG in base64."""
    records = [
        {
            "name": example.name,
            "expected": example.expected,
            "predicted": example.predicted,
            "correct": example.correct,
            "png": _png(example.pixels) if example.pixels is not None else "",
        }
        for example in sorted(examples, key=lambda example: example.correct)
    ]
    write_atomic(run.examples_file, json.dumps(records))


def _png(pixels_HWC: Tensor) -> str:
    file = io.BytesIO()
    Image.fromarray(pixels_HWC.cpu().numpy()).save(file, "PNG")
    return b64encode(file.getvalue()).decode()
