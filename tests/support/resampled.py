"""The kernel that resizes crops beside the same filter in float64: largest error. `resampled.py DEVICE`."""

import sys

import torch

from hotloop.kernels.resample import resample, resample_plain

BOXES = [
    (20, 24, 0.0, 0.0, 24.0, 20.0, 0.0),  # height, width, left, top, right, bottom, mirrored
    (33, 17, 2.5, 3.25, 14.5, 30.0, 1.0),
    (16, 16, 0.0, 0.0, 16.0, 16.0, 1.0),
    (5, 7, 1.0, 1.0, 3.0, 2.0, 0.0),
    (40, 40, 0.5, 0.5, 39.5, 39.0, 0.0),
    (0, 0, 0.0, 0.0, 0.0, 0.0, 0.0),  # a blank image
]


def largest_error(device: str, size: int = 16) -> float:
    draws = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (len(BOXES), 40 * 40 * 3), generator=draws, dtype=torch.uint8).to(device)
    boxes = torch.tensor([[*box, 0] for box in BOXES], device=device)
    mean, scale = torch.tensor([120.0, 110.0, 100.0], device=device), torch.tensor([0.02, 0.03, 0.04], device=device)
    found = resample(pixels, boxes, mean, scale, size, torch.float32)
    expected = resample_plain(pixels, boxes, mean, scale, size, torch.float64)
    assert found.shape == expected.shape
    assert found.is_contiguous(memory_format=torch.channels_last)
    return float((found - expected).abs().max())


if __name__ == "__main__":
    print(largest_error(sys.argv[1]))
