"""Crops that a device resizes: Pillow's filter to within rounding, by the kernel and by the plain way."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from hotloop.data.decode import Box, Cut, decode_crop
from hotloop.data.image_list import find_images
from hotloop.data.images import CenterCrop, ImageFiles, RandomCrop
from hotloop.data.loader import Loaders, LoaderSettings
from hotloop.kernels.resample import resample_plain

LEVELS = 1.01
"""Pillow rounds to whole levels after each of its two passes: at most half a level, and half a level again."""


def by_device(pixels: np.ndarray, box: np.ndarray, size: int) -> np.ndarray:
    """What a device makes of packed pixels, levels from 0 to 255."""
    one, nothing = torch.ones(3), torch.zeros(3)
    rows = torch.from_numpy(pixels.reshape(-1).copy())[None]
    found = resample_plain(rows, torch.from_numpy(box)[None], nothing, one, size, torch.float64)
    return found[0].permute(1, 2, 0).numpy()


@given(
    height=st.integers(1, 60), width=st.integers(1, 60), size=st.integers(1, 40), flip=st.booleans(),
    edges=st.tuples(*[st.floats(0, 1)] * 4), seed=st.integers(0, 999),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_the_filter_is_pillows(
    height: int, width: int, size: int, flip: bool, edges: tuple[float, ...], seed: int
) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    left, right = sorted((edges[0] * width, edges[1] * width))
    top, bottom = sorted((edges[2] * height, edges[3] * height))
    if right - left < 0.5 or bottom - top < 0.5:
        left, top, right, bottom = 0, 0, width, height
    cut = Cut(pixels, left, top, right, bottom, flip)
    found = by_device(*cut.packed(size, room=pixels.nbytes), size)
    assert np.abs(found - cut.resized(size).astype(float)).max() <= LEVELS


def test_what_has_no_room_is_resized_before_it_is_sent() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (50, 60, 3), dtype=np.uint8)
    cut = Cut(pixels, 3, 4, 55, 44, True)
    packed, box = cut.packed(8, room=8 * 8 * 3)
    assert packed.shape == (8, 8, 3)
    assert np.array_equal(by_device(packed, box, 8), cut.resized(8).astype(float))


def test_the_kernel_is_the_filter() -> None:
    script = Path(__file__).parents[1] / "support" / "resampled.py"
    done = subprocess.run(
        [sys.executable, script, "cpu"], capture_output=True, text=True, timeout=100, check=False,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout) < 1e-4


@pytest.mark.parametrize("workers", [0, 2])
def test_both_ways_give_the_same_crops_of_files(tmp_path: Path, workers: int) -> None:
    draws = np.random.default_rng(0)
    for label in ("a", "b"):
        (tmp_path / label).mkdir()
        for number, shape in enumerate([(60, 80), (30, 20), (200, 260), (64, 64), (15, 90)]):
            small = draws.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(small).resize(shape, Image.Resampling.BICUBIC).save(tmp_path / label / f"{number}.jpg")
    images = find_images(str(tmp_path))
    crops = [RandomCrop((0.2, 1.0), (0.7, 1.4), 0.5), CenterCrop(0.8)]
    settings = LoaderSettings(4, seed=3)
    for crop in crops:
        sets = [ImageFiles(images, 24, crop, 10**6, resize=resize) for resize in (True, False)]
        with Loaders([(data, settings) for data in sets], workers) as (plain, packed):
            for one, other in zip(plain.batches(), packed.batches(), strict=True):
                assert one.indices == other.indices
                found = [
                    by_device(*both, 24) for both in zip(*[other.arrays[n] for n in ("pixels", "boxes")], strict=True)
                ]
                assert np.abs(np.stack(found) - one.arrays["images"].astype(float)).max() <= LEVELS
                assert one.arrays["labels"].tolist() == other.arrays["labels"].tolist()


@pytest.mark.parametrize(("crop_side", "decoded_side"), [(50, 200), (100, 100), (199, 100), (200, 50)])
def test_jpeg_is_scaled_while_it_is_decoded_where_that_is_fast(
    tmp_path: Path, crop_side: int, decoded_side: int
) -> None:
    """By whole powers of two; the crop stays at least as large as what becomes of it."""
    Image.new("RGB", (200, 200)).save(tmp_path / "one.jpg")
    box = Box(0, 0, crop_side, crop_side, False)
    cut = decode_crop((tmp_path / "one.jpg").read_bytes(), "one.jpg", 50, lambda height, width: box, 10**6)
    assert cut.pixels.shape[0] == decoded_side
