"""A CPU training beside another one: what it costs that OpenMP's threads spin.

Two demo trainings share this machine, as they do on any machine that is not one's own. Once with hotloop's setting
(GOMP_SPINCOUNT=10000: spin briefly, then sleep), once with OpenMP's default. Samples per second of the first.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from record import Figure, publish

IMAGES = Path(__file__).parents[1] / "examples/digits/images"
DEFAULT = "300000"
"""What libgomp takes where nothing is set, by its manual (GOMP_SPINCOUNT)."""


def start(folder: Path, spin: str, epochs: int) -> subprocess.Popen[str]:
    settings = {"train.epochs": epochs, "run.dir": folder, "data.train": IMAGES / "train", "data.val": IMAGES / "val"}
    options = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "hotloop", "train", str(IMAGES.parent / "job.toml"), *options, "--json"]
    environment = {**os.environ, "GOMP_SPINCOUNT": spin}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, text=True)


def pair(spin: str, epochs: int) -> list[float]:
    """Samples per second of two trainings side by side."""
    with tempfile.TemporaryDirectory() as folder:
        both = [start(Path(folder) / name, spin, epochs) for name in ("a", "b")]
        return [json.loads(process.communicate(timeout=900)[0])["samples_per_second"] for process in both]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=1)
    arguments = parser.parse_args()
    speeds: dict[str, list[float]] = {"brief": [], "default": []}
    for _ in range(arguments.rounds):
        speeds["brief"] += pair("10000", arguments.epochs)
        speeds["default"] += pair(DEFAULT, arguments.epochs)
    figures = {name: Figure.of(values, "samples/s") for name, values in speeds.items()}
    content = {
        "samples_per_second": {name: asdict(figure) for name, figure in figures.items()},
        "ratio": figures["brief"].median / figures["default"].median,
    }
    publish("contention", content, arguments.json)


if __name__ == "__main__":
    main()
