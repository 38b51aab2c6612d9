"""Crops of images in files."""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from hotloop.data.crop_decoder import CropDecoder
from hotloop.data.dataset import Dataset, Sample
from hotloop.data.decode import Box, box_row, decode_crop
from hotloop.data.image_list import ImageList
from hotloop.data.jpeg import simple_size

PIXELS, BOXES = "pixels", "boxes"


@dataclass(frozen=True)
class RandomCrop:
    """A crop of random area and shape, and a random flip.

    Attributes:
        scale: share of the area, lowest and highest.
        ratio: width to height, lowest and highest; drawn evenly in its logarithm.
        flip: probability of a horizontal flip.
    """

    scale: tuple[float, float]
    ratio: tuple[float, float]
    flip: float

    def draw(self, height: int, width: int, random: np.random.Generator) -> Box:
        """The crop of an image of that size. The distribution is that of torchvision's RandomResizedCrop."""
        flip = random.random() < self.flip
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        for _ in range(10):
            area = height * width * (self.scale[0] + (self.scale[1] - self.scale[0]) * random.random())
            ratio = math.exp(low + (high - low) * random.random())
            crop_width, crop_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < crop_width <= width and 0 < crop_height <= height:
                top = int(random.integers(height - crop_height + 1))
                left = int(random.integers(width - crop_width + 1))
                return Box(top, left, crop_height, crop_width, flip)
        ratio = min(max(width / height, self.ratio[0]), self.ratio[1])
        crop_width, crop_height = min(width, round(height * ratio)), min(height, round(width / ratio))
        return Box((height - crop_height) // 2, (width - crop_width) // 2, crop_height, crop_width, flip)


@dataclass(frozen=True)
class CenterCrop:
    """The square in the middle; its side is `share` of the shorter side."""

    share: float

    def draw(self, height: int, width: int, random: np.random.Generator) -> Box:
        """The crop of an image of that size; nothing is drawn."""
        side = max(1, round(min(height, width) * self.share))
        return Box((height - side) // 2, (width - side) // 2, side, side, False)


@dataclass(frozen=True)
class ImageFiles(Dataset):
    """Crops of the images of a list.

    A sample is `images`, uint8 (size, size, 3), red green blue, and `labels`, int64. Where a device resizes, it is
    `pixels` and `boxes` in place of `images`, as `Cut.packed` gives them; where it decodes as well, `pixels` is the
    file's content and `boxes` says so.

    Attributes:
        crops_alone: whether workers decode no more of a JPEG than its crop, where nvImageCodec is installed.
        decoder: which does that, in a worker.
    """

    images: ImageList
    size: int
    crop: RandomCrop | CenterCrop
    max_pixels: int
    resize: bool = True
    crops_alone: bool = True
    decoder: CropDecoder | None = field(default=None, compare=False)

    def in_worker(self) -> Dataset:
        if self.crops_alone:
            with suppress(ImportError, OSError):
                return replace(self, decoder=CropDecoder())
        return self

    @property
    def room(self) -> Mapping[str, int]:  # type: ignore[override]
        """Of twice the size each way, which is nearly always enough, as JPEG is scaled by half where there is more."""
        return {} if self.resize else {PIXELS: (2 * self.size) ** 2 * 3}

    def __len__(self) -> int:
        return len(self.images)

    def sample(self, index: int, random: np.random.Generator) -> Sample:
        return self._decoded(index, self.images.read(index), random)

    def encoded(self, index: int, random: np.random.Generator) -> Sample:
        """As `sample`; what a device can decode and has room for is left to it."""
        content = self.images.read(index)
        size, room = simple_size(content), self.room.get(PIXELS, 0)
        if not size or max(3 * math.prod(size), len(content)) > room or math.prod(size) > self.max_pixels:
            return self._decoded(index, content, random)
        crop = self.crop.draw(*size, random)
        edges = crop.left, crop.top, crop.left + crop.width, crop.top + crop.height
        row = box_row(size, edges, crop.flip, encoded=len(content))
        return {PIXELS: np.frombuffer(content, np.uint8), BOXES: row, "labels": self._label(index)}

    def _decoded(self, index: int, content: bytes, random: np.random.Generator) -> Sample:
        path = self.images.path(index)
        cut = decode_crop(
            content, path, self.size, lambda h, w: self.crop.draw(h, w, random), self.max_pixels, self.decoder
        )
        if self.resize:
            return {"images": cut.resized(self.size), "labels": self._label(index)}
        pixels, row = cut.packed(self.size, self.room[PIXELS])
        return {PIXELS: pixels, BOXES: row, "labels": self._label(index)}

    def _label(self, index: int) -> np.ndarray:
        return np.asarray(self.images.label(index), dtype=np.int64)

    def name(self, index: int) -> str:
        return self.images.path(index)

    def fingerprint(self) -> str:
        return self.images.fingerprint()
