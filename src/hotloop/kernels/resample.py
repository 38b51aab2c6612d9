"""Crops of images of many sizes to one size: resize, mirror, normalise, cast and layout in one pass.

Legend: B images, S side of the result; N bytes of room for each image. The filter is Pillow's antialiased bilinear one:
a triangle as wide as the step from one pixel of the result to the next, cut off at the edges of the image.

A box says, float32: height and width of the pixels that are there; left, top, right and bottom of the crop in them; 1
if it is mirrored; and nothing that matters here (`hotloop.data.decode.box_row`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _WARPS = 512, 4


@triton.jit
def _triangle(distance, width):
    return tl.maximum(1.0 - tl.abs(distance) / width, 0.0)


@triton.jit
def _resample(pixels, boxes, mean, scale, out, N, S, BLOCK: tl.constexpr):
    """Pixels of the result, row by row: BLOCK of one image."""
    image = tl.program_id(0)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < S * S
    box = boxes + image * 8
    height, width = tl.load(box).to(tl.int32), tl.load(box + 1).to(tl.int32)
    left, top = tl.load(box + 2), tl.load(box + 3)
    step_x, step_y = (tl.load(box + 4) - left) / S, (tl.load(box + 5) - top) / S
    x = place % S
    x = tl.where(tl.load(box + 6) > 0, S - 1 - x, x)
    middle_x = left + (x + 0.5) * step_x
    middle_y = top + (place // S + 0.5) * step_y
    wide_x, wide_y = tl.maximum(step_x, 1.0), tl.maximum(step_y, 1.0)
    first_x = tl.maximum((middle_x - wide_x + 0.5).to(tl.int32), 0)
    first_y = tl.maximum((middle_y - wide_y + 0.5).to(tl.int32), 0)
    source = pixels + image.to(tl.int64) * N
    red, green, blue = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for down in range(0, tl.ceil(2 * wide_y).to(tl.int32) + 1):
        row = first_y + down
        weight_y = tl.where(row < height, _triangle(row + 0.5 - middle_y, wide_y), 0.0)
        for across in range(0, tl.ceil(2 * wide_x).to(tl.int32) + 1):
            column = first_x + across
            weight = weight_y * _triangle(column + 0.5 - middle_x, wide_x)
            weight = tl.where(column < width, weight, 0.0)
            at = source + (row * width + column) * 3
            used = inside & (weight > 0)
            red += weight * tl.load(at, mask=used, other=0)
            green += weight * tl.load(at + 1, mask=used, other=0)
            blue += weight * tl.load(at + 2, mask=used, other=0)
            total += weight
    total = tl.where(total > 0, total, 1.0)  # a blank image, which padding adds, has no pixel: it becomes black
    to = out + (image.to(tl.int64) * S * S + place) * 3
    tl.store(to, (red / total - tl.load(mean)) * tl.load(scale), mask=inside)
    tl.store(to + 1, (green / total - tl.load(mean + 1)) * tl.load(scale + 1), mask=inside)
    tl.store(to + 2, (blue / total - tl.load(mean + 2)) * tl.load(scale + 2), mask=inside)


@torch.library.custom_op("hotloop::resample", mutates_args=())
def resample(pixels: Tensor, boxes: Tensor, mean: Tensor, scale: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """The crops, (pixel - mean) * scale.

    Args:
        pixels: uint8 (B, N): the bytes of each image, row by row, red green blue.
        boxes: float32 (B, 8).
        mean: float32 (3,), of pixels from 0 to 255.
        scale: float32 (3,).

    Returns:
        (B, 3, size, size), channels last.
    """
    count = pixels.shape[0]
    out = torch.empty(count, size, size, 3, dtype=dtype, device=pixels.device)
    if count:
        grid = (count, triton.cdiv(size * size, _BLOCK))
        _resample[grid](pixels, boxes, mean, scale, out, pixels.shape[1], size, _BLOCK, num_warps=_WARPS)
    return out.permute(0, 3, 1, 2)


@resample.register_fake
def _(pixels: Tensor, boxes: Tensor, mean: Tensor, scale: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(pixels.shape[0], size, size, 3, dtype=dtype, device=pixels.device).permute(0, 3, 1, 2)


def resample_plain(pixels: Tensor, boxes: Tensor, mean: Tensor, scale: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """As `resample`, image by image in float64."""
    images = []
    for row, box in zip(pixels, boxes.tolist(), strict=True):
        height, width, left, top, right, bottom, mirrored, _ = box
        there = row[: int(height * width) * 3].view(int(height), int(width), 3).double()
        down, across = (
            weights(*edges, size).to(there) for edges in ((top, bottom, int(height)), (left, right, int(width)))
        )
        image = torch.einsum("yh,hwc,xw->yxc", down, there, across)
        image = image.flip(1) if mirrored else image
        images.append(image if there.numel() else torch.zeros(size, size, 3).to(image))
    result = (torch.stack(images) - mean.double()) * scale.double()
    return result.to(dtype).permute(0, 3, 1, 2)


def weights(begin: float, end: float, length: int, size: int) -> Tensor:
    """Share of each of `length` pixels in each of `size` that the stretch from `begin` to `end` becomes, float64
    (size, length).
    """
    step = (end - begin) / size
    width = max(step, 1.0)
    middles = begin + (torch.arange(size, dtype=torch.float64) + 0.5) * step
    distances = torch.arange(length, dtype=torch.float64) + 0.5 - middles[:, None]
    found = (1 - distances.abs() / width).clamp(min=0)
    return found / found.sum(1, keepdim=True)
