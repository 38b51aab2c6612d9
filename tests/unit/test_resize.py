"""Parts of images at another size: the filter of Pillow, to the level, whoever computes it."""

from importlib.util import find_spec

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotloop.data.resize import Edges, by_pillow, by_vectors, resize

WAYS = [by_pillow, pytest.param(by_vectors, marks=pytest.mark.skipif(
    find_spec("cykooz_resizer") is None, reason="cykooz-resizer is not installed: no wheel for this processor"
))]  # fmt: skip


def weights(length: int, start: float, end: float, size: int) -> np.ndarray:
    """How much of each pixel is in each resized one, float64 (size, length): a triangle, as wide as what it reduces."""
    scale = (end - start) / size
    centres = start + (np.arange(size) + 0.5) * scale
    distance = np.abs(np.arange(length) + 0.5 - centres[:, None]) / max(scale, 1.0)
    found = np.clip(1 - distance, 0, None)
    return np.asarray(found / found.sum(axis=1, keepdims=True))


def exact(pixels: np.ndarray, edges: Edges, size: int) -> np.ndarray:
    left, top, right, bottom = edges
    height, width = pixels.shape[:2]
    down, across = weights(height, top, bottom, size), weights(width, left, right, size)
    return np.asarray(np.einsum("ah,hwc,bw->abc", down, pixels.astype(float), across, optimize=True))


@pytest.mark.parametrize("way", WAYS)
@given(
    height=st.integers(1, 60), width=st.integers(1, 60), size=st.integers(1, 40),
    corners=st.tuples(*[st.floats(0, 1)] * 4), seed=st.integers(0, 999),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_each_way_is_within_a_level_of_the_filter_in_float64(
    way: object, height: int, width: int, size: int, corners: tuple[float, ...], seed: int
) -> None:
    assert callable(way)
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    left, right = sorted((corners[0] * width, corners[1] * width))
    top, bottom = sorted((corners[2] * height, corners[3] * height))
    edges = (left, top, right, bottom)
    if right - left < 0.5 or bottom - top < 0.5:
        edges = (0.0, 0.0, float(width), float(height))
    found = way(pixels, edges, size)
    assert (found.shape, found.dtype) == ((size, size, 3), np.uint8)
    assert np.abs(found - exact(pixels, edges, size)).max() <= 1.02  # half a level in each of two passes


def test_views_of_larger_images_are_resized_as_copies_are() -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (80, 90, 3), dtype=np.uint8)
    part = pixels[10:60, 20:85]
    edges = (1.0, 2.0, 60.5, 44.0)
    assert np.array_equal(resize(part, edges, 24), resize(part.copy(), edges, 24))
