"""One image file to one crop."""

import io
import math
import os
import stat
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import simplejpeg
from PIL import Image, UnidentifiedImageError

from hotloop.core.errors import DamagedSample
from hotloop.data.crop_decoder import CropDecoder, Region
from hotloop.data.jpeg import simple_size
from hotloop.data.resize import Edges, resize


@dataclass(frozen=True)
class Box:
    """A crop of an image, in its own pixels, and whether it is mirrored."""

    top: int
    left: int
    height: int
    width: int
    flip: bool


@dataclass(frozen=True)
class Cut:
    """Decoded pixels and the crop in them, in fractions of a pixel where they were scaled.

    Attributes:
        pixels: uint8 (height, width, 3), red green blue.
        left, top, right, bottom: edges of the crop.
        flip: whether it is mirrored.
    """

    pixels: np.ndarray
    left: float
    top: float
    right: float
    bottom: float
    flip: bool

    def resized(self, size: int) -> np.ndarray:
        """The crop as uint8 (size, size, 3), by Pillow's antialiased bilinear filter."""
        pixels, edges = self._around(size)
        if edges != (0, 0, size, size) or pixels.shape[:2] != (size, size):
            pixels = resize(pixels, edges, size)
        return _mirrored(pixels) if self.flip else pixels

    def packed(self, size: int, room: int) -> tuple[np.ndarray, np.ndarray]:
        """What a device needs to resize the crop.

        Where that is more than `room` bytes the crop is resized here, and there is nothing left to do there.

        Returns:
            uint8 (height, width, 3), and its row of boxes.
        """
        pixels, edges = self._around(size)
        if pixels.size > room:
            return self.resized(size), box_row((size, size), (0, 0, size, size))
        return pixels, box_row(pixels.shape[:2], edges, self.flip)

    def _around(self, size: int) -> tuple[np.ndarray, Edges]:
        """The pixels that the filter reads, and the crop's edges in those."""
        edges = (self.left, self.top, self.right, self.bottom)
        region = _read_for(edges, self.pixels.shape, size)
        return self.pixels[region.top : region.bottom, region.left : region.right], _inside(edges, region)


def _mirrored(pixels: np.ndarray) -> np.ndarray:
    """Colour by colour: a fifth of the time that copying the view `pixels[:, ::-1]` takes, three bytes at a time."""
    mirrored = np.empty_like(pixels)
    for colour in range(3):
        mirrored[..., colour] = pixels[:, ::-1, colour]
    return mirrored


def _read_for(edges: Edges, shape: tuple[int, ...], size: int) -> Region:
    """What the filter reads of an image of that shape: the crop, and some around it."""
    left, top, right, bottom = edges
    across, down = (math.ceil(max(part / size, 1.0)) for part in (right - left, bottom - top))
    return Region(
        max(0, math.floor(top) - down),
        max(0, math.floor(left) - across),
        min(shape[0], math.ceil(bottom) + down),
        min(shape[1], math.ceil(right) + across),
    )


def _inside(edges: Edges, region: Region) -> Edges:
    left, top, right, bottom = edges
    return left - region.left, top - region.top, right - region.left, bottom - region.top


ENCODED = 7
"""Where a row of boxes says how many bytes are there in place of pixels."""


def box_row(size: tuple[int, ...], edges: Edges, flip: bool = False, encoded: int = 0) -> np.ndarray:
    """What a device has to know of pixels to resize a crop of them.

    Args:
        size: height and width of the pixels.
        edges: left, top, right and bottom of the crop in them.
        flip: whether it is mirrored.
        encoded: bytes, if these have to be decoded first; 0: they are pixels.

    Returns:
        float32 (8,): all of these in this order.
    """
    return np.asarray([*size, *edges, flip, encoded], np.float32)


def read_file(path: str) -> bytes:
    """The content of an image's file.

    Raises:
        DamagedSample: it cannot be opened or read, is empty, or is no file: a pipe is waited for, a device has no end.
    """
    try:
        with open(path, "rb", buffering=0, opener=_open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise DamagedSample(path, "it is no regular file")
            content = file.readall()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise DamagedSample(path, getattr(error, "strerror", None) or str(error)) from None
    if not content:
        raise DamagedSample(path, "the file is empty")
    return content


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def decode_crop(
    content: bytes, name: str, size: int, crop: Callable[[int, int], Box], max_pixels: int,
    decoder: CropDecoder | None = None,
) -> Cut:  # fmt: skip
    """Decode an image and choose a crop that is to become (size, size).

    JPEG goes through libjpeg-turbo, which scales by 2, 4 or 8 while it decodes where the crop is larger than what is
    asked; the rest through Pillow. One 64×64 JPEG takes 0.1 ms, a photograph of 500×375 about 1 ms; `Cut.resized`
    another 0.2 ms.

    Args:
        content: of the file.
        name: of the file, for errors.
        crop: called once with height and width of the image, returns the crop.
        max_pixels: an image of more counts as damaged, before it is decoded.
        decoder: of the crop alone, for complete baseline JPEGs; what it refuses is decoded whole. Its pixels are there
            until it decodes the next image.

    Raises:
        DamagedSample: it cannot be decoded, or is too large.
    """
    try:
        if kind_of(content) == "jpeg":
            return _decode_jpeg(content, size, crop, max_pixels, decoder)
        return _decode_other(content, crop, max_pixels)
    except UnidentifiedImageError:
        raise DamagedSample(name, "it is no image of a known format") from None
    except Exception as error:  # on damaged data decoders raise whatever their parsers trip over
        raise DamagedSample(name, str(error).strip() or type(error).__name__) from None


def decode_whole(content: bytes, name: str, max_pixels: int) -> np.ndarray:
    """Decode all of an image, as it is stored: uint8 (height, width, 3). Otherwise as `decode_crop`."""

    def whole(height: int, width: int) -> Box:
        return Box(0, 0, height, width, flip=False)

    return decode_crop(content, name, _LARGER_THAN_ANY, whole, max_pixels).pixels


_LARGER_THAN_ANY = 2**20
"""A side that no image has, so that nothing is scaled away."""


def kind_of(content: bytes) -> str:
    """The format that a file's first bytes tell; empty if it is none of those that are read."""
    known = {"jpeg": b"\xff\xd8", "png": b"\x89PNG", "bmp": b"BM", "gif": b"GIF8", "webp": b"RIFF"}
    return next((kind for kind, start in known.items() if content.startswith(start)), "")


def orientation(content: bytes) -> int:
    """How a camera says that an image lies, 1 to 8; 1: as it is stored, which is how it is decoded."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(content)) as image:
                return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # damaged metadata of an image that can be decoded
        return 1


_ORIENTATION = 0x0112


def _decode_jpeg(
    content: bytes, size: int, crop: Callable[[int, int], Box], max_pixels: int, decoder: CropDecoder | None
) -> Cut:
    simple = simple_size(content)
    height, width, colorspace = (*simple, "YCbCr") if simple else simplejpeg.decode_jpeg_header(content)[:3]
    if colorspace in ("CMYK", "YCCK"):  # libjpeg-turbo does not convert it to RGB
        return _decode_other(content, crop, max_pixels)
    _check_size(height, width, max_pixels)
    box = crop(height, width)
    part = _smallest_part(min(box.height, box.width) / size)
    if decoder and simple and part == 1.0:
        region = _read_for(_edges(box), (height, width), size)
        if (pixels := decoder.decode(content, region)) is not None:
            return Cut(pixels, *_inside(_edges(box), region), box.flip)
    pixels = simplejpeg.decode_jpeg(
        content, "RGB", min_height=math.ceil(height * part), min_width=math.ceil(width * part)
    )
    return _cut(pixels, box, pixels.shape[0] / height, pixels.shape[1] / width)


def _smallest_part(ratio: float) -> float:
    """To which part of its size an image may be scaled whose crop is so many times too large.

    libjpeg-turbo knows all eighths, but has fast code for these alone: 6/8 takes 1.2 times as long as 8/8.
    """
    return next((part for part in (0.125, 0.25, 0.5) if part * ratio >= 1), 1.0)


def _decode_other(content: bytes, crop: Callable[[int, int], Box], max_pixels: int) -> Cut:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns of sizes that max_pixels decides on, and of odd metadata
        if max_pixels > 2 * (Image.MAX_IMAGE_PIXELS or math.inf):  # of which Pillow opens no image to tell its size
            Image.MAX_IMAGE_PIXELS = None
        with _opened(content, max_pixels) as image:
            if image.format == "EPS":  # Pillow would give it to Ghostscript
                raise ValueError("it is PostScript, a program, which is not run")
            _check_size(image.height, image.width, max_pixels)
            if image.mode == "F" or (image.mode == "I" and image.format == "TIFF"):
                raise ValueError("its pixels have 32 bits each, and nothing says from where to where they go")
            pixels = np.asarray(_eight_bits(image).convert("RGB"))
    return _cut(pixels, crop(pixels.shape[0], pixels.shape[1]), 1.0, 1.0)


def _opened(content: bytes, max_pixels: int) -> Image.Image:
    try:
        return Image.open(io.BytesIO(content))
    except Image.DecompressionBombError:  # whose limit is another one than ours, and larger
        raise ValueError(f"it has far more pixels than the limit of {max_pixels:,} (max_pixels)") from None


def _eight_bits(image: Image.Image) -> Image.Image:
    """The upper of 16 bits, as Pillow itself takes of 16-bit colours; grey ones it would clip."""
    if not image.mode.startswith("I"):
        return image
    return Image.fromarray((np.asarray(image).clip(0, 2**16 - 1) >> 8).astype(np.uint8))


def _check_size(height: int, width: int, max_pixels: int) -> None:
    if height * width > max_pixels:
        raise ValueError(f"{width} x {height} is {height * width:,} pixels; the limit is {max_pixels:,} (max_pixels)")


def _cut(pixels: np.ndarray, box: Box, down: float, across: float) -> Cut:
    left, top, right, bottom = _edges(box)
    right, bottom = min(right * across, pixels.shape[1]), min(bottom * down, pixels.shape[0])  # 411 * (103 / 411) > 103
    return Cut(pixels, left * across, top * down, right, bottom, box.flip)


def _edges(box: Box) -> Edges:
    return box.left, box.top, box.left + box.width, box.top + box.height
