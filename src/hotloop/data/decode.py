"""One image file to one crop of a given size."""

import io
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import simplejpeg
from PIL import Image, UnidentifiedImageError

from hotloop.core.errors import DamagedSample


@dataclass(frozen=True)
class Box:
    """A crop of an image, in its own pixels, and whether it is mirrored."""

    top: int
    left: int
    height: int
    width: int
    flip: bool


def decode_crop(path: str, size: int, crop: Callable[[int, int], Box], max_pixels: int) -> np.ndarray:
    """Read an image file, crop it, and resize the crop to (size, size).

    JPEG goes through libjpeg-turbo, which scales by eighths while it decodes where the crop is larger than what is
    asked; the rest through Pillow. Resizing is Pillow's antialiased bilinear filter. One 64×64 JPEG takes 0.1 ms,
    a photograph of 500×375 about 1 ms.

    Args:
        crop: called once with height and width of the image, returns the crop.
        max_pixels: an image of more counts as damaged, before it is decoded.

    Returns:
        uint8 (size, size, 3), red green blue.

    Raises:
        DamagedSample: the file cannot be opened or decoded, or is too large.
    """
    try:
        with open(path, "rb") as file:
            content = file.read()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise DamagedSample(path, getattr(error, "strerror", None) or str(error)) from None
    if not content:
        raise DamagedSample(path, "the file is empty")
    try:
        if content.startswith(b"\xff\xd8"):
            pixels, box = _decode_jpeg(content, size, crop, max_pixels)
        else:
            pixels, box = _decode_other(content, crop, max_pixels)
    except UnidentifiedImageError:
        raise DamagedSample(path, "it is no image of a known format") from None
    except Exception as error:  # on damaged data decoders raise whatever their parsers trip over
        raise DamagedSample(path, str(error).strip() or type(error).__name__) from None
    return _resize(pixels, box, size)


@dataclass(frozen=True)
class _ScaledBox:
    """A crop in the pixels of what was decoded; fractions where it was scaled."""

    left: float
    top: float
    right: float
    bottom: float
    flip: bool


def _decode_jpeg(
    content: bytes, size: int, crop: Callable[[int, int], Box], max_pixels: int
) -> tuple[np.ndarray, _ScaledBox]:
    height, width, colorspace, _ = simplejpeg.decode_jpeg_header(content)
    if colorspace in ("CMYK", "YCCK"):  # libjpeg-turbo does not convert it to RGB
        return _decode_other(content, crop, max_pixels)
    _check_size(height, width, max_pixels)
    box = crop(height, width)
    pixels = simplejpeg.decode_jpeg(
        content,
        "RGB",
        min_height=math.ceil(height * min(1.0, size / box.height)),
        min_width=math.ceil(width * min(1.0, size / box.width)),
    )
    return pixels, _scaled(box, pixels.shape[0] / height, pixels.shape[1] / width)


def _decode_other(content: bytes, crop: Callable[[int, int], Box], max_pixels: int) -> tuple[np.ndarray, _ScaledBox]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns of sizes that max_pixels decides on, and of odd metadata
        with Image.open(io.BytesIO(content)) as image:
            _check_size(image.height, image.width, max_pixels)
            pixels = np.asarray(_eight_bits(image).convert("RGB"))
    return pixels, _scaled(crop(pixels.shape[0], pixels.shape[1]), 1.0, 1.0)


def _eight_bits(image: Image.Image) -> Image.Image:
    """The upper of 16 bits, as Pillow itself takes of 16-bit colours; grey ones it would clip."""
    if not image.mode.startswith("I"):
        return image
    return Image.fromarray((np.asarray(image).clip(0, 2**16 - 1) >> 8).astype(np.uint8))


def _check_size(height: int, width: int, max_pixels: int) -> None:
    if height * width > max_pixels:
        raise ValueError(f"{width} x {height} is {height * width:,} pixels; the limit is {max_pixels:,} (max_pixels)")


def _scaled(box: Box, down: float, across: float) -> _ScaledBox:
    bottom, right = (box.top + box.height) * down, (box.left + box.width) * across
    return _ScaledBox(box.left * across, box.top * down, right, bottom, box.flip)


def _resize(pixels: np.ndarray, box: _ScaledBox, size: int) -> np.ndarray:
    edges = (box.left, box.top, box.right, box.bottom)
    if edges != (0, 0, size, size) or pixels.shape[:2] != (size, size):
        image = Image.fromarray(pixels).resize((size, size), Image.Resampling.BILINEAR, box=edges)
        pixels = np.asarray(image)
    return pixels[:, ::-1] if box.flip else pixels
