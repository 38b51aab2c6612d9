"""What each setting does to the loss: the digits and a small language model, every precision against fp32.

Each run has the same seed, order and first weights. The figure is the mean training loss of each epoch (digits) or of
each tenth of the run (language model), and the largest distance from fp32's over them, beside the distance that another
seed makes: what is less than that is noise.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import record

import hotloop
from hotloop.core.job_file import load_job, parse_job
from hotloop.train.observer import Observer, Warned

DIGITS = Path(__file__).parents[1] / "examples/digits"
SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32"},
    "fp32, another seed": {"precision": "fp32", "seed": 1},
    "tf32": {"precision": "tf32"},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "bf16, compiled": {"precision": "bf16", "speed.compile": True},
    "bf16, not captured": {"precision": "bf16", "speed.graph": False},
    "float8, compiled": {"precision": "float8", "speed.compile": True},
}


class Said(Observer):
    """Shows what a run could not do."""

    def on(self, event: object) -> None:
        if isinstance(event, Warned):
            print(event.text, file=sys.stderr)


def curve(job: hotloop.Job, parts: int) -> list[float]:
    """Mean training loss of each of `parts` stretches of a run."""
    run, _ = hotloop.train_job(job, hotloop.read_machine(), Said())
    losses = [record["loss"] for record in run.metrics() if record["event"] == "step"]
    return [float(np.mean(part)) for part in np.array_split(losses, parts)]


def digits(folder: Path, settings: dict[str, Any], epochs: int) -> list[float]:
    overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    overrides += [f"train.epochs={epochs}", f"run.dir={folder}", "log.every=1", "data.workers=4"]
    overrides += [f"data.train={DIGITS}/images/train", f"data.val={DIGITS}/images/val"]
    return curve(load_job(DIGITS / "job.toml", overrides), epochs)


def language(folder: Path, settings: dict[str, Any], tokens: int) -> list[float]:
    """A decoder of four layers on the Python files that come with torch, by bytes."""
    file = folder.parent / "text.npy"
    if not file.exists():
        sources = sorted((Path(torch.__file__).parent / "nn").rglob("*.py"))
        text = np.frombuffer(b"".join(source.read_bytes() for source in sources), np.uint8)
        np.save(file, text[:tokens].astype(np.uint16))
    raw: dict[str, Any] = {
        "task": {"name": "tokens", "context": 128, "vocabulary": 256},
        "data": {"train": str(file), "batch_size": 32, "workers": 1},
        "model": {"name": "gpt2", "arguments": {"layers": 4, "width": 128, "heads": 4, "kv_heads": 4, "hidden": 512}},
        "train": {"epochs": 1, "clip_norm": 1.0},
        "optimizer": {"name": "adamw", "learning_rate": 1e-3},
        "log": {"every": 1, "tensorboard": False},
        "run": {"dir": str(folder)},
        "speed": {},
    }
    for key, value in settings.items():
        section, _, name = key.rpartition(".")
        (raw[section] if section else raw)[name] = value
    return curve(parse_job(raw, "bench"), 10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1_600_000)
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    skipped: dict[str, str] = {}
    curves: dict[str, dict[str, list[float]]] = {"digits": {}, "language": {}}
    with tempfile.TemporaryDirectory() as folder:
        for name, settings in SETTINGS.items():
            makes = {"digits": (digits, arguments.epochs), "language": (language, arguments.tokens)}
            for task, (make, length) in makes.items():
                started = time.perf_counter()
                try:
                    curves[task][name] = make(Path(folder) / f"{task}-{name}", settings, length)
                except hotloop.InputError as error:
                    skipped[f"{task}, {name}"] = f"{error.what}: {error.cause}"
                print(f"{task}, {name}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
            if on_gpu:
                record("numerics", content(curves, skipped))
    if arguments.json or not on_gpu:
        print(json.dumps(content(curves, skipped)))


def content(curves: dict[str, dict[str, list[float]]], skipped: dict[str, str]) -> dict[str, Any]:
    distances = {
        task: {name: float(np.abs(np.subtract(values, of["fp32"])).max()) for name, values in of.items()}
        for task, of in curves.items()
    }
    return {"curves": curves, "distance_from_fp32": distances, "skipped": skipped}


if __name__ == "__main__":
    main()
