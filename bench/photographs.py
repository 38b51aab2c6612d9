"""Photographs of ImageNet's size and weight, made from those that ship with scikit-learn and scikit-image.

`python bench/photographs.py FOLDER COUNT` writes COUNT distinct JPEGs of 500 × 375 pixels, 110 to 140 KiB each, in ten
class folders.
"""

import io
import os
import sys
from functools import cache, partial
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from PIL import Image

_WIDTH, _HEIGHT = 500, 375
_LEAST_BYTES = 110 * 1024
_CLASSES = 10


@cache
def originals() -> list[Image.Image]:
    """The photographs in colour that are there, at least 400 pixels wide."""
    folders = [("sklearn", "datasets/images"), ("skimage", "data")]
    found = []
    for package, inside in folders:
        spec = find_spec(package)
        if spec and spec.origin:
            for file in sorted((Path(spec.origin).parent / inside).iterdir()):
                if file.suffix in (".jpg", ".jpeg", ".png") and file.stem != "phantom":  # a drawing
                    with Image.open(file) as image:
                        if image.mode == "RGB" and min(image.size) >= 300 and image.width >= 400:
                            found.append(image.copy())
    if not found:
        sys.exit("no photographs: pip install scikit-learn scikit-image")
    return found


def write_one(number: int, folder: Path) -> None:
    """A random part of a photograph, mirrored or not, with another brightness and the grain of a sensor."""
    draws = np.random.default_rng(number)
    image = originals()[number % len(originals())]
    width = image.width * draws.uniform(0.6, 1.0)
    height = min(image.height, width * _HEIGHT / _WIDTH)
    left, top = draws.uniform(0, image.width - width), draws.uniform(0, image.height - height)
    box = (left, top, left + width, top + height)
    part = image.resize((_WIDTH, _HEIGHT), Image.Resampling.BICUBIC, box=box)
    if draws.random() < 0.5:
        part = part.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    grain = draws.normal(0, draws.uniform(4, 9), (_HEIGHT, _WIDTH, 1))
    pixels = (np.asarray(part) * draws.uniform(0.8, 1.2) + grain).clip(0, 255).astype(np.uint8)
    for quality in range(84, 101, 2):
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "JPEG", quality=quality)
        if file.tell() >= _LEAST_BYTES:
            break
    (folder / str(number % _CLASSES) / f"{number}.jpg").write_bytes(file.getvalue())


def make_photographs(folder: Path, count: int) -> None:
    """Write them, those that are missing, on all processors."""
    for label in range(_CLASSES):
        (folder / str(label)).mkdir(parents=True, exist_ok=True)
    missing = [number for number in range(count) if not (folder / str(number % _CLASSES) / f"{number}.jpg").exists()]
    with get_context("spawn").Pool(len(os.sched_getaffinity(0))) as pool:
        pool.map(partial(write_one, folder=folder), missing, chunksize=50)


if __name__ == "__main__":
    make_photographs(Path(sys.argv[1]), int(sys.argv[2]))
