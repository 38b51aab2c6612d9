"""Two hours' worth of batches: memory, handles and threads of the pipeline must not grow.

A ResNet-50 at 8,650 images a second takes 243,000 batches of 256 in two hours; here batches of 32 small images go by as
fast as two processors make them. One file is damaged, so that replacements happen too. Growth is the median of the last
quarter less that of the second: the first is warm-up.
"""

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from record import publish

from hotloop.data.image_list import find_images
from hotloop.data.images import ImageFiles, RandomCrop
from hotloop.data.loader import Loaders, LoaderSettings

_BATCHES, _BATCH, _FILES, _WORKERS, _SAMPLES = 243_000, 32, 512, 2, 400


def state(process: int) -> dict[str, int]:
    """Memory that is the process's own, open files and threads."""
    status = Path(f"/proc/{process}/status").read_text()
    return {
        "own_bytes": int(status.split("RssAnon:")[1].split()[0]) * 1024,
        "open_files": len(os.listdir(f"/proc/{process}/fd")),
        "threads": int(status.split("Threads:")[1].split()[0]),
    }


def processes() -> list[int]:
    """This one and its workers."""
    own = os.getpid()
    children = Path(f"/proc/{own}/task/{own}/children").read_text().split()
    return [own, *map(int, children)]


def make_files(folder: Path) -> None:
    draws = np.random.default_rng(0)
    for number in range(_FILES):
        file = folder / f"{number % 2}" / f"{number}.jpg"
        file.parent.mkdir(exist_ok=True)
        Image.fromarray(draws.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(file)
    (folder / "0/damaged.jpg").write_bytes(b"\xff\xd8 no image")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--batches", type=int, default=_BATCHES)
    arguments = parser.parse_args()
    samples: list[dict[str, int]] = []
    with tempfile.TemporaryDirectory() as folder:
        make_files(Path(folder))
        data = ImageFiles(find_images(folder), 16, RandomCrop((0.5, 1.0), (0.8, 1.25), 0.5), 10**6)
        with Loaders([(data, LoaderSettings(_BATCH))], _WORKERS) as (loader,):
            every = max(1, arguments.batches // _SAMPLES)
            for number, _ in enumerate(loader.batches(epochs=arguments.batches // len(loader) + 1)):
                if number % every == 0:
                    each = [state(process) for process in processes()]
                    samples.append({key: sum(one[key] for one in each) for key in each[0]})
                    print(f"{number:,} batches {samples[-1]}", end="\r", file=sys.stderr)
                if number == arguments.batches:
                    break
            ring = loader.memory.nbytes
    publish("long_run", content(samples, arguments.batches, ring), arguments.json)


def content(samples: list[dict[str, int]], batches: int, ring: int) -> dict[str, Any]:
    quarter = len(samples) // 4
    growth = {
        key: statistics.median(sample[key] for sample in samples[-quarter:])
        - statistics.median(sample[key] for sample in samples[quarter : 2 * quarter])
        for key in samples[0]
    }
    return {"batches": batches, "last": samples[-1], "growth": growth, "ring_bytes": ring, "goal": "no growth"}


if __name__ == "__main__":
    main()
