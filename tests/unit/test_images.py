import io
import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import write_image
from PIL import EpsImagePlugin, Image

from hotloop.core.errors import DamagedSample, InputError
from hotloop.data.decode import Box, decode_crop, read_file
from hotloop.data.image_arrays import load_images
from hotloop.data.image_list import find_images
from hotloop.data.images import CenterCrop, ImageFiles, RandomCrop
from hotloop.data.random import sample_generator

LIMIT = 10**6


def pillow(file: Path) -> Image.Image:
    with Image.open(file) as image:
        return image.convert("RGB")


def whole(height: int, width: int) -> Box:
    return Box(0, 0, height, width, flip=False)


def test_class_folders_are_read_in_order_of_name(make_images: Callable[..., Path]) -> None:
    folder = make_images(classes=3, each=2)
    write_image(folder / "class1/deep/x.webp", 1)
    (folder / "class1/notes.txt").write_text("no image")
    (folder / ".hidden").mkdir()
    write_image(folder / "class1/.thumbnails/y.png", 1)
    write_image(folder / "class2/scan.TIFF", 1)
    images = find_images(str(folder))
    assert images.classes == ("class0", "class1", "class2")
    assert images.labels.array.tolist() == [0, 0, 1, 1, 1, 2, 2, 2]
    assert [Path(path).name for path in map(images.path, range(len(images)))] == [
        "000.png",
        "001.png",
        "000.png",
        "001.png",
        "x.webp",
        "000.png",
        "001.png",
        "scan.TIFF",
    ]


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_lists_name_files_relative_to_themselves(make_images: Callable[..., Path], suffix: str) -> None:
    folder = make_images(classes=2, each=1)
    rows = [("class0/000.png", "cat"), ("class1/000.png", "dog")]
    file = folder / f"list.{suffix}"
    lines = ["path,label", *(f"{path},{label}" for path, label in rows)]
    file.write_text("\n".join(lines if suffix == "csv" else [json.dumps({"path": p, "label": c}) for p, c in rows]))
    images = find_images(str(file))
    assert images.classes == ("cat", "dog")
    assert [Path(path).exists() for path in map(images.path, range(len(images)))] == [True, True]


def bad_data(folder: Path) -> dict[str, tuple[str, str]]:
    """Each kind of bad data: where it is, and what the error says."""
    write_image(folder / "one/only/a.png", 0)
    write_image(folder / "empty/a/a.png", 0)
    (folder / "empty/b").mkdir()
    (folder / "bare").mkdir()
    (folder / "columns.csv").write_text("file,class\na.png,cat\n")
    (folder / "twice.csv").write_text("path,label,label\na.png,cat,dog\nb.png,dog,cat\n")
    (folder / "list.jsonl").write_text('{"path": "a.png"}\n')
    (folder / "nothing.csv").write_text("")
    (folder / "latin.jsonl").write_bytes('{"path": "é.png", "label": "a"}'.encode("latin-1"))
    (folder / "latin.csv").write_bytes("path,label\né.png,a".encode("latin-1"))
    (folder / "quote.csv").write_text('path,label\n"a.png,cat\nb.png,dog\n')
    (folder / "extra.csv").write_text("path,label\na.png,,cat\n")
    (folder / "null.jsonl").write_text('{"path": "a.png", "label": null}')
    lists = '{"path": "a.png", "label": ["cat", "dog"]}\n{"path": "b.png", "label": "cat"}'
    (folder / "several.jsonl").write_text(lists)
    (folder / "half.jsonl").write_text('{"path": "\\ud83d.png", "label": "a"}')  # of a pair of surrogates
    write_image(folder / "linked/a/a.png", 0)
    write_image(folder / "linked/b/b.png", 0)
    (folder / "linked/c").symlink_to("/nowhere/c")
    (folder / "blank.jsonl").write_text('{"path": "a.png", "label": ""}')
    return {
        "missing": (str(folder / "nowhere"), "no data at"),
        "one class": (str(folder / "one"), "has 1 class; at least 2"),
        "empty class": (str(folder / "empty"), "has no images"),
        "no class": (str(folder / "bare"), "has 0 classes"),
        "columns": (str(folder / "columns.csv"), "has the columns file, class"),
        "column twice": (str(folder / "twice.csv"), "has the columns path, label, label"),
        "another place": ("S3://bucket/train", "S3://bucket/train is no place that data is read from"),
        "no label": (str(folder / "list.jsonl"), "line 1"),
        "empty list": (str(folder / "nothing.csv"), "has 0 classes"),
        "latin jsonl": (str(folder / "latin.jsonl"), "cannot read"),
        "latin csv": (str(folder / "latin.csv"), "cannot read"),
        "open quote": (str(folder / "quote.csv"), "is no line of a .csv file"),
        "extra column": (str(folder / "extra.csv"), "line 2 has more columns than the first line"),
        "null label": (str(folder / "null.jsonl"), "line 1"),
        "several labels": (str(folder / "several.jsonl"), "line 1"),
        "half a character": (str(folder / "half.jsonl"), "line 1"),
        "link to nowhere": (str(folder / "linked"), "c is a link that leads nowhere"),
        "blank label": (str(folder / "blank.jsonl"), "line 1"),
    }


KINDS = ["missing", "one class", "empty class", "no class", "columns", "no label", "empty list"]
KINDS += ["column twice", "another place", "several labels", "half a character", "link to nowhere"]
KINDS += ["latin jsonl", "latin csv", "open quote", "extra column", "null label", "blank label"]


@pytest.mark.parametrize("kind", KINDS)
def test_bad_data_is_refused_with_its_reason(tmp_path: Path, kind: str) -> None:
    location, text = bad_data(tmp_path)[kind]
    with pytest.raises(InputError) as caught:
        find_images(location)
    assert text in caught.value.what
    assert str(caught.value).count("\n") == 2


def test_links_that_lead_up_are_not_followed_and_others_are(make_images: Callable[..., Path]) -> None:
    folder = make_images(classes=2, each=1)
    elsewhere = make_images("elsewhere", classes=1, each=3)
    (folder / "class0/more").symlink_to(elsewhere / "class0")
    for link, target in (("class0/loop", "class0"), ("class1/up", "."), ("class2", "."), ("class3", "..")):
        (folder / link).symlink_to(folder / target)
    (elsewhere / "class0/back").symlink_to(folder / "class0")
    (folder / "itself").symlink_to(folder / "itself")
    images = find_images(str(folder))
    assert images.classes == ("class0", "class1")
    assert images.labels.array.tolist() == [0, 0, 0, 0, 1]


def test_lines_of_a_list_end_at_newlines_alone(tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text("path,label\na\u2028b.png,cat\nc.png,dog\n")
    assert list(find_images(str(tmp_path / "list.csv")).names) == ["a\u2028b.png", "c.png"]


def test_a_space_after_a_comma_makes_no_other_class(tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text("path, label\n1.png,cat\n2.png, cat\n3.png, dog\n")
    images = find_images(str(tmp_path / "list.csv"))
    assert images.classes == ("cat", "dog")
    assert [images.label(number) for number in range(3)] == [0, 0, 1]


def test_blanks_around_the_cells_of_a_list_do_not_count_but_in_the_name_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "3.png ").touch()
    (tmp_path / "list.csv").write_text('path , label \n1.png ,cat \n" 2.png",cat\t\n3.png ,dog\n')
    images = find_images(str(tmp_path / "list.csv"))
    assert list(images.names) == ["1.png", "2.png", "3.png "]
    assert images.classes == ("cat", "dog")
    (tmp_path / "list.csv").write_text('path,label\n1.png," "\n')
    with pytest.raises(InputError, match='label is ""'):
        find_images(str(tmp_path / "list.csv"))


def test_a_label_that_training_does_not_have_is_refused(make_images: Callable[..., Path]) -> None:
    with pytest.raises(InputError, match='label "class1"'):
        find_images(str(make_images(classes=2)), classes=("class0", "other"))


@pytest.mark.parametrize(
    ("suffix", "options"),
    [(".jpg", {"quality": 95}), (".png", {}), (".webp", {"lossless": True}), (".bmp", {}), (".gif", {})],
)
def test_each_format_gives_the_pixels_that_pillow_gives(
    tmp_path: Path, suffix: str, options: dict[str, object]
) -> None:
    file = write_image(tmp_path / f"a{suffix}", 3, (32, 32), **options)
    expected = np.asarray(pillow(file)).astype(int)
    actual = decode_crop(read_file(str(file)), str(file), 32, whole, LIMIT).resized(32).astype(int)
    assert np.abs(actual - expected).max() <= (3 if suffix == ".jpg" else 0)


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "1", "I;16", "CMYK"])
def test_every_colour_mode_becomes_red_green_blue(tmp_path: Path, mode: str) -> None:
    file = tmp_path / ("a.jpg" if mode == "CMYK" else "a.png")
    grey = np.linspace(0, 255, 16 * 16).reshape(16, 16)
    if mode == "I;16":
        Image.fromarray((grey * 257).astype(np.uint16)).save(file)
    else:
        Image.fromarray(grey.astype(np.uint8)).convert(mode).save(file)
    pixels = decode_crop(read_file(str(file)), str(file), 16, whole, LIMIT).resized(16)
    assert pixels.shape == (16, 16, 3)
    assert pixels[0, 0].max() < 60
    assert pixels[-1, -1].min() > 195


@pytest.mark.parametrize("name", ["a.png", "a.tiff", "a.pgm"])
def test_grey_of_16_bits_is_scaled_not_clipped(tmp_path: Path, name: str) -> None:
    grey = np.linspace(0, 2**16 - 1, 16 * 16).reshape(16, 16).astype(np.uint16)
    Image.fromarray(grey).save(tmp_path / name)
    pixels = decode_crop(read_file(str(tmp_path / name)), str(tmp_path / name), 16, whole, LIMIT).resized(16)
    assert np.abs(pixels[..., 0] - grey / 257).max() <= 1


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_grey_of_32_bits_is_refused_not_made_black(tmp_path: Path, dtype: type) -> None:
    file = tmp_path / "a.tif"
    Image.fromarray(np.ones((8, 8), dtype)).save(file)
    with pytest.raises(DamagedSample, match="32 bits each"):
        decode_crop(read_file(str(file)), str(file), 8, whole, LIMIT)


def test_a_bomb_is_refused_by_our_limit_whatever_pillows_is(tmp_path: Path) -> None:
    file = tmp_path / "bomb.png"
    Image.new("1", (20_000, 20_000)).save(file)
    with pytest.raises(DamagedSample, match=r"1,000,000 \(max_pixels\)"):
        decode_crop(read_file(str(file)), str(file), 8, whole, 1_000_000)


@pytest.mark.parametrize("suffix", [".jpg", ".png"])
@pytest.mark.parametrize(
    "box", [Box(10, 20, 100, 140, flip=False), Box(0, 0, 300, 400, flip=True), Box(33, 7, 25, 31, flip=False)]
)
def test_a_crop_is_close_to_pillows_own(tmp_path: Path, suffix: str, box: Box) -> None:
    """JPEG may be scaled while it is decoded: a mean difference of 1.5 of 255 is allowed, one level otherwise."""
    file = write_image(tmp_path / f"a{suffix}", 5, (400, 300), **({"quality": 95} if suffix == ".jpg" else {}))
    edges = (box.left, box.top, box.left + box.width, box.top + box.height)
    resized = pillow(file).resize((48, 48), Image.Resampling.BILINEAR, box=edges)
    expected = np.asarray(resized).astype(int)[:, :: -1 if box.flip else 1]
    actual = decode_crop(read_file(str(file)), str(file), 48, lambda h, w: box, LIMIT).resized(48).astype(int)
    assert np.abs(actual - expected).mean() <= (1.5 if suffix == ".jpg" else 0.3)
    assert suffix == ".jpg" or np.abs(actual - expected).max() <= 1


def damaged_files(folder: Path) -> dict[str, Path]:
    good = write_image(folder / "good.jpg", 1, (64, 64))
    png = write_image(folder / "good.png", 1, (64, 64))
    contents = {
        "empty.jpg": b"",
        "text.jpg": b"this is a text",
        "cut.jpg": good.read_bytes()[:300],
        "cut.png": png.read_bytes()[:-60],
        "flipped.png": png.read_bytes()[:60] + bytes([png.read_bytes()[60] ^ 255]) + png.read_bytes()[61:],
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    write_image(folder / "huge.png", 1, (1100, 1000))
    write_image(folder / "huge.jpg", 1, (1100, 1000))
    (folder / "folder.jpg").mkdir()
    os.mkfifo(folder / "pipe.jpg")
    (folder / "device.jpg").symlink_to("/dev/zero")
    return {name: folder / name for name in [*contents, *OTHERS]}


OTHERS = ["huge.png", "huge.jpg", "folder.jpg", "absent.jpg", "pipe.jpg", "device.jpg"]


@pytest.mark.parametrize("name", ["empty.jpg", "text.jpg", "cut.jpg", "cut.png", "flipped.png", *OTHERS])
def test_a_damaged_file_is_named_with_its_reason(tmp_path: Path, name: str) -> None:
    file = damaged_files(tmp_path)[name]
    with pytest.raises(DamagedSample) as caught:
        decode_crop(read_file(str(file)), str(file), 16, whole, LIMIT).resized(16)
    assert caught.value.name == str(file)
    assert caught.value.reason
    assert "\n" not in caught.value.reason


@pytest.mark.parametrize(("width", "size"), [(411, 100), (407, 50), (415, 100), (411, 200)])
@pytest.mark.parametrize("upright", [False, True])
def test_a_scaled_image_whose_crop_reaches_its_edge_is_resized(width: int, size: int, upright: bool) -> None:
    """411 * (103 / 411) is 103.00000000000001, and a resizer may refuse what lies outside of an image."""
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (600, width, 3) if not upright else (width, 600, 3), dtype=np.uint8)
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "JPEG")
    cut = decode_crop(
        content.getvalue(), "a.jpg", size, lambda h, w: Box(h - width, w - width, width, width, False), 10**7
    )
    assert cut.resized(size).shape == (size, size, 3)
    assert cut.packed(size, 10**6)[1][5] <= cut.pixels.shape[0]


def test_the_limit_of_pixels_may_be_above_pillows_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    file = tmp_path / "large.png"
    write_image(file, 1, (20, 20))
    content = read_file(str(file))
    with pytest.raises(DamagedSample):
        decode_crop(content, str(file), 20, whole, 150)
    assert decode_crop(content, str(file), 20, whole, 400).pixels.shape == (20, 20, 3)
    with pytest.raises(DamagedSample, match="the limit is 399"):
        decode_crop(content, str(file), 20, whole, 399)


def test_a_postscript_file_is_damaged_and_no_program_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = tmp_path / "ran"
    ghostscript = tmp_path / "gs"
    ghostscript.write_text(f"#!/bin/sh\ntouch {ran}\n")
    ghostscript.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # Pillow looks for it once
    content = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"
    with pytest.raises(DamagedSample, match="PostScript"):
        decode_crop(content, "cat.jpg", 16, whole, LIMIT)
    assert not ran.exists()


@given(
    st.integers(1, 600),
    st.integers(1, 600),
    st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)).map(lambda pair: (min(pair), max(pair))),
    st.integers(0, 10**6),
)
def test_random_crops_stay_inside(height: int, width: int, scale: tuple[float, float], index: int) -> None:
    box = RandomCrop(scale, (0.75, 4 / 3), 0.5).draw(height, width, sample_generator(0, 0, index))
    assert 0 <= box.top
    assert 0 <= box.left
    assert 1 <= box.height <= height - box.top
    assert 1 <= box.width <= width - box.left


def test_random_crops_have_the_share_and_shape_that_is_asked() -> None:
    crop = RandomCrop((0.1, 0.4), (0.75, 4 / 3), 0.25)
    boxes = [crop.draw(300, 400, sample_generator(0, 0, index)) for index in range(2000)]
    shares = np.array([box.height * box.width / 120_000 for box in boxes])
    ratios = np.array([math.log(box.width / box.height) for box in boxes])
    assert shares.min() > 0.09
    assert shares.max() < 0.41
    assert abs(shares.mean() - 0.25) < 0.01
    assert abs(ratios.mean()) < 0.02
    assert abs(np.mean([box.flip for box in boxes]) - 0.25) < 0.03


def test_a_center_crop_is_the_square_in_the_middle() -> None:
    assert CenterCrop(0.5).draw(100, 200, sample_generator(0, 0, 0)) == Box(25, 75, 50, 50, flip=False)


def test_moved_data_is_the_same_data_and_renamed_data_is_not(make_images: Callable[..., Path], tmp_path: Path) -> None:
    def fingerprint(folder: Path) -> str:
        return ImageFiles(find_images(str(folder)), 8, CenterCrop(1), LIMIT).fingerprint()

    folder = make_images()
    before = fingerprint(folder)
    moved = folder.rename(tmp_path / "moved")
    assert fingerprint(moved) == before
    (moved / "class0/000.png").rename(moved / "class0/999.png")
    assert fingerprint(moved) != before


def test_file_names_that_are_no_utf8_have_a_fingerprint(make_images: Callable[..., Path]) -> None:
    folder = make_images()
    before = ImageFiles(find_images(str(folder)), 8, CenterCrop(1), LIMIT).fingerprint()
    os.rename(folder / "class0/000.png", os.fsencode(folder) + b"/class0/caf\xe9.png")
    assert ImageFiles(find_images(str(folder)), 8, CenterCrop(1), LIMIT).fingerprint() != before


@pytest.mark.parametrize("kind", ["empty", "text", "cut", "flipped", "npy"])
def test_an_array_file_that_cannot_be_read_is_refused(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "a.npz"
    np.savez_compressed(file, images=np.ones((20, 8, 8, 3), np.uint8), labels=np.arange(20) % 2)
    content = bytearray(file.read_bytes())
    content[60] ^= 255
    contents = {"empty": b"", "text": b"text", "cut": file.read_bytes()[:100], "flipped": bytes(content)}
    if kind == "npy":
        with file.open("wb") as opened:
            np.save(opened, np.zeros(3))
    else:
        file.write_bytes(contents[kind])
    with pytest.raises(InputError, match="cannot read") as caught:
        load_images(str(file))
    assert str(caught.value).count("\n") == 2
    assert caught.value.cause


def encoded(kind: str) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (24, 31, 3), dtype=np.uint8)
    options = {"progressive": True} if kind == "progressive" else {}
    Image.fromarray(pixels).save(file, "JPEG" if kind == "progressive" else kind, **options)
    return file.getvalue()


@given(
    kind=st.sampled_from(["JPEG", "progressive", "PNG", "WEBP", "BMP", "GIF"]),
    changes=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=12),
    end=st.floats(0, 1) | st.just(1.0),
)
@settings(max_examples=400, deadline=None)
def test_whatever_bytes_a_file_has_it_is_decoded_or_damaged(
    kind: str, changes: list[tuple[float, int]], end: float
) -> None:
    content = bytearray(encoded(kind))
    for place, value in changes:
        content[int(place * (len(content) - 1))] = value
    try:
        pixels = decode_crop(bytes(content[: int(end * len(content))]), "x", 8, whole, 10**5).resized(8)
    except DamagedSample as damaged:
        assert damaged.name == "x"
        assert damaged.reason
    else:
        assert (pixels.shape, pixels.dtype) == ((8, 8, 3), np.uint8)
