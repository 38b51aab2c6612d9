"""Image files as a model's inputs, without torch: what validation does on a CPU, bit for bit.

Shape suffixes: C channels, H height, W width.
"""

import glob
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from hotloop.core.errors import DamagedSample
from hotloop.data.decode import Box, Cut, decode_crop, read_file
from hotloop.data.image_list import SUFFIXES
from hotloop.data.images import CenterCrop
from hotloop.export.manifest import ImageInput

_LARGEST_FILE = 2**30
"""Bytes of an image's file: the limit on pixels holds once its header is read."""
_NO_DRAWS = np.random.default_rng(0)
"""A crop of the middle draws nothing."""


def read_image(path: str, settings: ImageInput) -> np.ndarray:
    """An image's input, float32 (3, size, size).

    Raises:
        DamagedSample: it cannot be read, or is too large.
    """
    try:
        state = os.stat(path)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise DamagedSample(path, getattr(error, "strerror", None) or str(error)) from None
    if stat.S_ISDIR(state.st_mode):
        raise DamagedSample(path, "a folder without images")
    if not stat.S_ISREG(state.st_mode):
        raise DamagedSample(path, "it is no file")
    if state.st_size > _LARGEST_FILE:
        raise DamagedSample(path, f"it has {state.st_size:,} bytes; the limit is {_LARGEST_FILE:,}")
    return normalised(_cut(read_file(path), path, settings).resized(settings.size), settings)


def _cut(content: bytes, path: str, settings: ImageInput) -> Cut:
    size, middle = settings.size, CenterCrop(settings.center_crop)

    def crop(height: int, width: int) -> Box:
        if settings.keep_exact and (height, width) == (size, size):
            return Box(0, 0, size, size, flip=False)
        return middle.draw(height, width, _NO_DRAWS)

    return decode_crop(content, path, size, crop, settings.max_pixels)


def normalised(pixels_HWC: np.ndarray, settings: ImageInput) -> np.ndarray:
    """As `ImageClassification.prepare` does it, in the same order of the same operations."""
    mean, std = (np.asarray(values, np.float32)[:, None, None] for values in (settings.mean, settings.std))
    pixels_CHW = pixels_HWC.transpose(2, 0, 1).astype(np.float32)
    result: np.ndarray = (pixels_CHW - np.float32(255) * mean) * (np.float32(1) / (np.float32(255) * std))
    return result


def find_files(names: Sequence[str]) -> Iterator[str]:
    """The files that were meant: files as they are, images in folders and all below them by name, patterns ("*.jpg").

    A name that is nothing of these, or a folder without images, is given as it is, so that it is told as what cannot be
    read.
    """
    for name in names:
        if os.path.isdir(name):
            yield from list(_below(name)) or [name]
        elif not os.path.lexists(name) and glob.has_magic(name):
            yield from sorted(glob.glob(name, recursive=True)) or [name]
        else:
            yield name


def _below(folder: str) -> Iterator[str]:
    for parent, folders, files in os.walk(folder):
        folders.sort()
        yield from (os.path.join(parent, file) for file in sorted(files) if Path(file).suffix.lower() in SUFFIXES)
