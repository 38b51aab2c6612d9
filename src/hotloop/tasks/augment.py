"""Random crops, shifts and flips of a batch on the device, from random numbers that are given.

Shape suffixes: B batch, C channels, H height, W width.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

RANDOM_NUMBERS = 5
"""For each image: area, shape, left, top, flip."""


@dataclass(frozen=True)
class Crops:
    """How images are cut: the same draws as `data.images.RandomCrop`, in one kernel for a batch.

    Attributes:
        scale: share of the area, lowest and highest; (1, 1): all of it.
        ratio: width to height, lowest and highest; drawn evenly in its logarithm.
        flip: probability of a horizontal flip.
        shift: largest shift, pixels; what comes in at the edges is mirrored.
    """

    scale: tuple[float, float] = (1.0, 1.0)
    ratio: tuple[float, float] = (1.0, 1.0)
    flip: float = 0.0
    shift: int = 0

    def boxes(self, random: Tensor, height: int, width: int) -> Tensor:
        """Where each output pixel comes from, as affine maps, float32 (B, 2, 3); `random` is (B, 5), 0 to 1."""
        area, shape, left, top, flip = random.unbind(1)
        if self.scale == (1.0, 1.0):
            share_x = share_y = torch.ones_like(area)
        else:
            low, high = (math.log(ratio) for ratio in self.ratio)
            root_area = (self.scale[0] + (self.scale[1] - self.scale[0]) * area).sqrt()
            root_ratio = (0.5 * (low + (high - low) * shape)).exp() * (height / width) ** 0.5
            share_x, share_y = (root_area * root_ratio).clamp(max=1), (root_area / root_ratio).clamp(max=1)
        shift_x = (
            ((2 * self.shift + 1) * left).floor() - self.shift if self.shift else (1 - share_x) * (left - 0.5) * width
        )
        shift_y = (
            ((2 * self.shift + 1) * top).floor() - self.shift if self.shift else (1 - share_y) * (top - 0.5) * height
        )
        sign = torch.where(flip < self.flip, -1.0, 1.0)
        zero = torch.zeros_like(area)
        rows = [share_x * sign, zero, 2 * shift_x / width, zero, share_y, 2 * shift_y / height]
        return torch.stack(rows, dim=1).view(-1, 2, 3)

    def cut(self, images_BCHW: Tensor, random: Tensor, size: int) -> Tensor:
        """The crops, float32 (B, C, size, size), interpolated linearly."""
        count, _, height, width = images_BCHW.shape
        boxes = self.boxes(random, height, width)
        middles = (torch.arange(size, device=boxes.device) * 2 + 1) / size - 1
        # Not affine_grid: its matrix product takes 48 of 3,400 µs of a small network's step on an H200, for two sums.
        x_BW = boxes[:, 0, :1] * middles + boxes[:, 0, 2:]
        y_BH = boxes[:, 1, 1:2] * middles + boxes[:, 1, 2:]
        shape = (count, size, size)
        grid = torch.stack([x_BW[:, None].expand(shape), y_BH[:, :, None].expand(shape)], dim=3)
        return functional.grid_sample(images_BCHW, grid, padding_mode="reflection", align_corners=False)
