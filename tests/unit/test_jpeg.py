"""What is said of a JPEG without decoding it: a size for the common kind alone, and never a wrong one."""

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from hotloop.data.jpeg import simple_size


def jpeg(mode: str = "RGB", size: tuple[int, int] = (40, 24), **options: Any) -> bytes:
    noise = np.random.default_rng(0).integers(0, 256, (6, 10, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).resize(size).convert(mode).save(file, "JPEG", **options)
    return file.getvalue()


def test_common_ones_have_their_size() -> None:
    for subsampling in ("4:4:4", "4:2:2", "4:2:0"):
        assert simple_size(jpeg(subsampling=subsampling)) == (24, 40)
    exif = Image.Exif()
    exif[0x0112] = 6
    assert simple_size(jpeg(exif=exif, quality=100)) == (24, 40), "as it is stored"
    assert simple_size(jpeg(comment=b"\xff\xd8\xff\xc2 no marker")) == (24, 40)
    assert simple_size(jpeg() + b"\0" * 8) == (24, 40)


@pytest.mark.parametrize(
    "content",
    [
        jpeg(progressive=True), jpeg("L"), jpeg("CMYK"), jpeg(keep_rgb=True), jpeg()[:-40], jpeg()[:200], b"",
        b"\xff\xd8", jpeg() + b"\0" * 100, b"\x89PNG" + jpeg(),
    ],
)  # fmt: skip
def test_others_have_none(content: bytes) -> None:
    assert simple_size(content) is None


def test_a_second_frame_is_not_the_common_kind() -> None:
    content = jpeg()
    at = content.index(b"\xff\xc0")
    length = 2 + int.from_bytes(content[at + 2 : at + 4])
    frame = bytearray(content[at : at + length])
    frame[5:9] = (8).to_bytes(2) + (8).to_bytes(2)
    assert simple_size(content[:at] + bytes(frame) + content[at:]) is None


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_what_is_told_of_a_damaged_one_is_what_pillow_reads(data: st.DataObject) -> None:
    content = bytearray(jpeg(subsampling=data.draw(st.sampled_from(["4:4:4", "4:2:0"]))))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, 700)) % len(content)] = data.draw(st.integers(0, 255))
    size = simple_size(bytes(content))
    if size:
        try:
            with Image.open(io.BytesIO(content)) as image:
                assert (image.height, image.width) == size
        except OSError:  # other markers than those that were looked at
            pass


@given(st.binary(max_size=300))
def test_it_reads_anything(content: bytes) -> None:
    assert simple_size(b"\xff\xd8" + content + b"\xff\xd9") is None or len(content) > 20
