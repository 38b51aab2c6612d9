"""Pictures for tests."""

from pathlib import Path

import numpy as np
from PIL import Image


def write_image(path: Path, seed: int, size: tuple[int, int] = (24, 20), **options: object) -> Path:
    """A small picture with smooth content that depends on `seed`; width, height."""
    noise = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC).save(path, **options)
    return path
