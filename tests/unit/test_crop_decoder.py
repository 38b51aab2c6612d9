"""Crops that are decoded alone: the same pixels as of whole images, and nothing that is damaged without notice."""

import gc
import io
import os
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from hotloop.core.errors import DamagedSample
from hotloop.data import crop_decoder
from hotloop.data.crop_decoder import CropDecoder, Region
from hotloop.data.decode import Box, Cut, decode_crop, decode_whole
from hotloop.data.image_list import find_images
from hotloop.data.images import ImageFiles, RandomCrop
from hotloop.data.loader import Loaders, LoaderSettings

pytestmark = pytest.mark.skipif(
    not crop_decoder.is_installed(), reason="nvImageCodec is not installed: pip install 'hotloop[cpu-decode]'"
)
LIMIT = 10**6


def jpeg(seed: int = 0, height: int = 90, width: int = 130, **options: object) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (9, 13, 3), dtype=np.uint8)
    image = Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)
    file = io.BytesIO()
    image.save(file, "JPEG", **options)
    return file.getvalue()


@cache
def decoder() -> CropDecoder:
    return CropDecoder()


def cropped(content: bytes, box: Box, size: int, with_decoder: bool) -> Cut:
    return decode_crop(content, "x", size, lambda height, width: box, LIMIT, decoder() if with_decoder else None)


@given(
    sampling=st.sampled_from([0, 1, 2]), quality=st.integers(40, 98), seed=st.integers(0, 99),
    size=st.tuples(st.integers(8, 130), st.integers(8, 130)), corners=st.tuples(*[st.floats(0, 0.99)] * 4),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_the_pixels_are_those_of_the_whole_image(
    sampling: int, quality: int, seed: int, size: tuple[int, int], corners: tuple[float, ...]
) -> None:
    content = jpeg(seed, *size, subsampling=sampling, quality=quality)
    top, bottom = sorted(int(part * size[0]) for part in corners[:2])
    left, right = sorted(int(part * size[1]) for part in corners[2:])
    found = decoder().decode(content, Region(top, left, bottom + 1, right + 1))
    assert (found is None) == (right - left < 7)  # too narrow, so left to others
    if found is not None:
        assert np.array_equal(found, decode_whole(content, "x", LIMIT)[top : bottom + 1, left : right + 1])


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("box", [(0, 0, 90, 130), (13, 7, 40, 61), (80, 120, 10, 10), (0, 0, 1, 1)])
def test_a_crop_is_the_same_with_and_without_it(box: tuple[int, int, int, int], flip: bool) -> None:
    ways = [cropped(jpeg(), Box(*box, flip), 48, way) for way in (True, False)]
    alone, whole = (way.resized(48) for way in ways)
    assert np.array_equal(alone, whole)
    (pixels, row), (expected, expected_row) = (way.packed(48, room=10**6) for way in ways)
    assert np.array_equal(pixels, expected)
    assert row.tolist() == expected_row.tolist()
    assert box[2] in (1, 90) or ways[0].pixels.size < ways[1].pixels.size  # it was decoded alone


@pytest.mark.parametrize(
    "content",
    [
        jpeg(progressive=True),
        jpeg(exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"),  # lies on its side
        jpeg(quality=100, subsampling=0),
        jpeg(height=16, width=16),
    ],
)
def test_unusual_files_give_what_they_give_without_it(content: bytes) -> None:
    box = Box(2, 3, 12, 11, False)
    found, expected = (cropped(content, box, 8, way).resized(8) for way in (True, False))
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("kept", [0.3, 0.9])
def test_a_file_that_is_cut_off_is_damaged_though_its_crop_is_there(kept: float) -> None:
    content = jpeg(quality=95)
    with pytest.raises(DamagedSample):
        cropped(content[: int(kept * len(content))], Box(0, 0, 8, 8, False), 8, with_decoder=True)


def test_nothing_is_written_to_standard_error_and_what_was_said_counts_as_damage(
    capfd: pytest.CaptureFixture[str],
) -> None:
    content = jpeg(quality=95)
    start = content.index(b"\xff\xda") + 20
    for place in range(start, len(content) - 40, 37):
        damaged = content[:place] + bytes(32) + content[place + 32 :]
        decoder().decode(damaged, Region(0, 0, 90, 130))
    assert capfd.readouterr().err == ""
    assert decoder().decode(content, Region(0, 0, 90, 130)) is not None  # earlier complaints are not held against it


@given(
    changes=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=12), end=st.floats(0, 1) | st.just(1.0)
)
@settings(max_examples=400, deadline=None)
def test_whatever_bytes_a_file_has_it_is_decoded_or_damaged(changes: list[tuple[float, int]], end: float) -> None:
    content = bytearray(jpeg(height=40, width=50))
    for place, value in changes:
        content[int(place * (len(content) - 1))] = value
    try:
        pixels = cropped(bytes(content[: int(end * len(content))]), Box(3, 4, 20, 20, True), 8, True).resized(8)
    except DamagedSample as damaged:
        assert damaged.name == "x"
    else:
        assert (pixels.shape, pixels.dtype) == ((8, 8, 3), np.uint8)


def test_workers_use_it_and_give_the_same_batches(tmp_path: Path) -> None:
    for number in range(12):
        folder = tmp_path / str(number % 2)
        folder.mkdir(exist_ok=True)
        (folder / f"{number}.jpg").write_bytes(jpeg(number))
    images = find_images(str(tmp_path))
    crop = RandomCrop((0.1, 1.0), (0.7, 1.4), 0.5)
    assert isinstance(found := ImageFiles(images, 32, crop, LIMIT).in_worker(), ImageFiles)
    assert found.decoder
    batches = []
    for alone in (True, False):
        data = ImageFiles(images, 32, crop, LIMIT, crops_alone=alone)
        with Loaders([(data, LoaderSettings(4))], 2) as (loader,):
            batches.append([batch.arrays["images"].copy() for batch in loader.batches()])
    assert np.array_equal(*np.asarray(batches))


def test_it_takes_no_thread_and_gives_its_file_back() -> None:
    gc.collect()  # what earlier tests have left open is closed whenever it is collected
    threads, files = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
    made = CropDecoder()
    made.decode(jpeg(), Region(0, 0, 20, 20))
    del made
    gc.collect()
    assert len(os.listdir("/proc/self/task")) <= threads
    assert len(os.listdir("/proc/self/fd")) <= files


def test_memory_does_not_grow_with_the_number_of_images() -> None:
    """nvImageCodec loses 32 bytes whenever it is asked where an image lies: 1 GB in 30 epochs of a million images."""

    def own_bytes() -> int:
        return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) * 1024

    content, region = jpeg(height=16, width=16), Region(0, 0, 16, 16)
    for _ in range(5000):
        decoder().decode(content, region)
    before = own_bytes()
    for _ in range(20000):
        decoder().decode(content, region)
    assert own_bytes() - before < 200_000


def test_a_version_that_works_otherwise_is_as_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Workers decode whole images then."""
    from nvidia import nvimgcodec

    with monkeypatch.context() as older:
        older.setattr(nvimgcodec, "__version__", "0.8.1.39")
        with pytest.raises(ImportError, match=r"0\.9 is the oldest that opens no GPU"):
            CropDecoder()
    monkeypatch.delattr(nvimgcodec, "Region")
    with pytest.raises(ImportError, match="nvImageCodec cannot be used"):
        CropDecoder()
    (tmp_path / "list.csv").write_text("path,label\na.jpg,a\nb.jpg,b\n")
    data = ImageFiles(find_images(str(tmp_path / "list.csv")), 8, RandomCrop((0.1, 1.0), (0.7, 1.4), 0.5), LIMIT)
    assert data.in_worker() is data
