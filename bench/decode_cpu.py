"""Photographs from files to batches of random crops on the host, by processors alone: images a second for each core.

224 pixels, random area, shape and flip, uint8, batches of 64, as many workers as there are processors. The rivals are
DataLoaders over torchvision's decoder and over Pillow with the transforms of the guides. hotloop does the same work for
a training on a CPU; for one on a GPU, which resizes by itself, it decodes and cuts. The goal: at least 1.5 times the
better rival.

Each contender is a process of its own, and they take turns.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from photographs import make_photographs
from record import Figure, publish

_SIZE, _BATCH, _SCALE, _RATIO = 224, 64, (0.08, 1.0), (3 / 4, 4 / 3)
_SKIPPED = 4
"""Batches before the time is taken: workers start, and fill ahead."""


def hotloop_batches(folder: Path, workers: int, epochs: int, resize: bool) -> Iterable[int]:
    from hotloop.data.image_list import find_images
    from hotloop.data.images import ImageFiles, RandomCrop
    from hotloop.data.loader import Loaders, LoaderSettings

    data = ImageFiles(find_images(str(folder)), _SIZE, RandomCrop(_SCALE, _RATIO, 0.5), 10**8, resize)
    with Loaders([(data, LoaderSettings(_BATCH))], workers) as (loader,):
        for batch in loader.batches(epochs=epochs):
            yield batch.size


def dataloader_batches(folder: Path, workers: int, epochs: int, decoder: str) -> Iterable[int]:
    import torch
    from torch.utils.data import DataLoader
    from torchvision import datasets, io
    from torchvision.transforms import v2

    crop = [v2.RandomResizedCrop(_SIZE, _SCALE, _RATIO, antialias=True), v2.RandomHorizontalFlip()]
    if decoder == "torchvision":
        data = datasets.ImageFolder(
            str(folder), v2.Compose(crop), loader=lambda path: io.decode_image(path, io.ImageReadMode.RGB)
        )
    else:
        data = datasets.ImageFolder(str(folder), v2.Compose([*crop, v2.PILToTensor()]))
    torch.set_num_threads(1)
    loader = DataLoader(data, _BATCH, shuffle=True, num_workers=workers, persistent_workers=True, prefetch_factor=4)
    for _ in range(epochs):
        for images, _ in loader:
            yield len(images)


CONTENDERS: dict[str, Callable[[Path, int, int], Iterable[int]]] = {
    "hotloop": partial(hotloop_batches, resize=True),
    "hotloop, for a GPU": partial(hotloop_batches, resize=False),
    "torchvision": partial(dataloader_batches, decoder="torchvision"),
    "Pillow": partial(dataloader_batches, decoder="Pillow"),
}


def rate(name: str, folder: Path, workers: int, epochs: int) -> float:
    """Images a second, here."""
    images, started = 0, 0.0
    for number, size in enumerate(CONTENDERS[name](folder, workers, epochs)):
        images += size if number >= _SKIPPED else 0
        if number == _SKIPPED - 1:
            started = time.perf_counter()
    return images / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--images", type=int, default=1500)
    parser.add_argument("--folder", type=Path, help="where the photographs are or are to be; otherwise not kept")
    parser.add_argument("--contender", choices=CONTENDERS, help="time this one here and print its images a second")
    arguments = parser.parse_args()
    workers = len(os.sched_getaffinity(0))
    if arguments.contender:
        print(rate(arguments.contender, arguments.folder, workers, arguments.epochs))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        make_photographs(folder, arguments.images)
        rates: dict[str, list[float]] = {name: [] for name in CONTENDERS}
        for _ in range(arguments.rounds):
            for name, found in rates.items():
                command = [sys.executable, __file__, "--contender", name, "--folder", str(folder)]
                command += ["--epochs", str(arguments.epochs)]
                done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
                found.append(float(done.stdout) / workers)
                print(f"{name}: {found[-1]:.0f} images/s a core", file=sys.stderr, flush=True)
    publish("decode_cpu", content(rates, workers), arguments.json)


def content(rates: dict[str, list[float]], workers: int) -> dict[str, Any]:
    each = {name: Figure.of(found, "images/s a core") for name, found in rates.items()}
    best = max(("torchvision", "Pillow"), key=lambda name: each[name].median)
    return {
        "workers": workers,
        "images_per_second_and_core": {name: asdict(figure) for name, figure in each.items()},
        "best_rival": best,
        "ratios": {name: each[name].median / each[best].median for name in ("hotloop", "hotloop, for a GPU")},
        "goal": "hotloop: ratio >= 1.5",
    }


if __name__ == "__main__":
    main()
