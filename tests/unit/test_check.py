"""What `hotloop data check` finds, on files with everything wrong that files can have."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from pictures import write_image
from PIL import Image

from hotloop.data.check import Findings, check_images
from hotloop.data.image_list import find_images, passed_over
from hotloop.data.pack import PackSettings, pack_images
from hotloop.pages.data import render_findings

LIMIT = 10**6


def spoilt(folder: Path) -> Path:
    """Ten good images of "cat", two of "dog", and one of each fault."""
    for number in range(10):
        write_image(folder / f"cat/{number}.png", number, (40, 40))
    write_image(folder / "dog/0.png", 50, (40, 40))
    write_image(folder / "dog/1.png", 51, (40, 40))
    good = (folder / "cat/0.png").read_bytes()
    (folder / "cat/empty.png").write_bytes(b"")
    (folder / "cat/text.jpg").write_text("no image")
    (folder / "cat/cut.png").write_bytes(good[:-40])
    write_image(folder / "cat/bomb.png", 9, (1200, 1000))
    (folder / "cat/copy.png").write_bytes(good)
    (folder / "dog/said-to-be-a-dog.png").write_bytes((folder / "cat/1.png").read_bytes())
    (folder / "cat/really-png.jpg").write_bytes((folder / "cat/2.png").read_bytes() + b" ")
    write_image(folder / "cat/small.png", 7, (10, 60))
    return folder


@pytest.mark.parametrize("workers", [0, 2])
def test_each_fault_is_found(tmp_path: Path, workers: int) -> None:
    looked: list[int] = []
    images = find_images(str(spoilt(tmp_path / "train")))
    findings = check_images([images], workers, LIMIT, looked.append)

    def names(found: list[object]) -> list[str]:
        return [Path(one.path).name for one in found]  # type: ignore[attr-defined]

    assert findings.images == sum(looked) == 20
    assert sorted(names([*findings.damaged])) == ["bomb.png", "cut.png", "empty.png", "text.jpg"]
    assert all(one.reason for one in findings.damaged)
    assert sorted(sorted(Path(path).name for path in group.paths) for group in findings.duplicates) == [
        ["0.png", "copy.png"],
        ["1.png", "said-to-be-a-dog.png"],
    ]
    assert [group.labels for group in findings.contradictions] == [["cat", "dog"]]
    assert findings.leaks == []
    assert names([*findings.wrong_suffix]) == ["really-png.jpg"]
    assert names([*findings.tiny]) == ["small.png"]
    assert findings.classes == {str(tmp_path / "train"): {"cat": 17, "dog": 3}}
    assert findings.is_error


def test_what_is_in_order_is_no_error(make_images: Callable[..., Path]) -> None:
    findings = check_images([find_images(str(make_images(each=3)))], 0, LIMIT)
    assert not findings.is_error
    assert findings.damaged == findings.duplicates == []
    assert findings.uneven == {}


def test_images_in_training_and_validation_are_found(make_images: Callable[..., Path], tmp_path: Path) -> None:
    train = make_images("train", each=3)
    val = tmp_path / "val"
    shutil.copytree(train / "class0", val / "class0")
    write_image(val / "class1/new.png", 99)
    findings = check_images([find_images(str(folder)) for folder in (train, val)], 0, LIMIT)
    assert len(findings.leaks) == 3
    assert findings.leaks[0].locations == [str(train), str(val)]
    assert findings.is_error


def test_classes_that_only_training_or_only_validation_has_are_named(tmp_path: Path) -> None:
    train, val = tmp_path / "train", tmp_path / "val"
    for number, name in enumerate(("train/cat", "train/dog", "train/fox", "val/cat", "val/dog", "val/owl")):
        write_image(tmp_path / name / "0.png", number, (40, 40))
    sets = [find_images(str(folder)) for folder in (train, val)]
    findings = check_images(sets, 0, LIMIT)
    assert (findings.untrained, findings.unvalidated) == ({str(val): ["owl"]}, {str(val): ["fox"]})
    assert findings.is_error
    page = render_findings(findings, sets, LIMIT)
    assert f"Without an image in {train}, so that they are not trained: owl." in page
    assert "Without an image here: fox." in page
    shutil.rmtree(val / "owl")
    lacking = check_images([find_images(str(folder)) for folder in (train, val)], 0, LIMIT)
    assert (lacking.untrained, lacking.is_error) == ({}, False), "a training takes such data"


def test_classes_of_very_different_sizes_are_named(tmp_path: Path) -> None:
    for number in range(30):
        write_image(tmp_path / f"many/{number}.png", number)
    write_image(tmp_path / "few/0.png", 77)
    write_image(tmp_path / "few/1.png", 78)
    assert check_images([find_images(str(tmp_path))], 0, LIMIT).uneven == {str(tmp_path): 15.0}


def test_a_data_set_that_is_damaged_altogether_is_reported(tmp_path: Path) -> None:
    for label in ("a", "b"):
        (tmp_path / label).mkdir()
        (tmp_path / label / "x.jpg").write_text("no image")
    findings = check_images([find_images(str(tmp_path))], 0, LIMIT)
    assert len(findings.damaged) == 2


def test_a_huge_image_is_named(tmp_path: Path) -> None:
    write_image(tmp_path / "a/x.png", 1)
    (tmp_path / "b").mkdir()
    Image.fromarray(np.zeros((4000, 4001, 3), np.uint8)).save(tmp_path / "b/x.jpg")
    findings = check_images([find_images(str(tmp_path))], 0, 10**8)
    assert [odd.reason for odd in findings.huge] == ["4001 × 4000"]


def test_a_list_may_name_files_by_any_of_their_formats_suffixes(tmp_path: Path) -> None:
    for name, kind in (("a.tif", "TIFF"), ("b.jfif", "JPEG"), ("c.jpg", "TIFF"), ("d.tif", "PNG")):
        write_image(tmp_path / name, ord(name[0]), (40, 40), format=kind)
    (tmp_path / "list.csv").write_text("path,label\na.tif,cat\nb.jfif,cat\nc.jpg,dog\nd.tif,dog\n")
    findings = check_images([find_images(str(tmp_path / "list.csv"))], 0, LIMIT)
    assert [Path(fault.path).name for fault in findings.wrong_suffix] == ["c.jpg", "d.tif"]


def test_the_page_shows_them_and_nothing_from_outside(tmp_path: Path) -> None:
    images = find_images(str(spoilt(tmp_path / "<b>train")))
    findings = check_images([images], 0, LIMIT)
    page = render_findings(findings, [images], LIMIT)
    assert "really-png.jpg" in page
    assert "cut.png" in page
    assert "&lt;b&gt;train" in page
    assert page.count("data:image/jpeg;base64") == 4
    assert "http" not in page
    assert "in order" in render_findings(Findings(), [], LIMIT)


def test_photographs_that_viewers_turn_are_named(tmp_path: Path) -> None:
    for label in ("a", "b"):
        (tmp_path / label).mkdir()
        Image.new("RGB", (60, 40)).save(tmp_path / label / "straight.jpg")
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (60, 41)).save(tmp_path / "a/turned.jpg", exif=exif)
    findings = check_images([find_images(str(tmp_path))], 0, LIMIT)
    assert [(Path(odd.path).name, odd.reason) for odd in findings.rotated] == [("turned.jpg", "EXIF orientation 6")]


def test_nothing_but_what_is_beside_shards_is_passed_over(make_images: Callable[..., Path], tmp_path: Path) -> None:
    folder, shards = make_images(each=2), tmp_path / "shards"
    (folder / "class0/up").symlink_to(folder)
    (folder / "list.csv").write_text("path,label\nclass0/000.png,a\nclass1/000.png,b\n")
    pack_images(find_images(str(folder)), shards, PackSettings(), 0)
    (shards / "README.md").touch()
    locations = (f"{shards}/", f"{shards}/000000.tar", f"{folder}/list.csv", str(folder))
    found = [passed_over(find_images(location)) for location in locations]
    assert found == [[str(shards / "README.md")], [], [], [str(folder / "list.csv")]]


def test_the_page_shows_images_of_shards_too(make_images: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_images(classes=2, each=2)
    shutil.copy(folder / "class0/000.png", folder / "class0/again.png")
    pack_images(find_images(str(folder)), tmp_path / "shards", PackSettings(), 0)
    images = find_images(str(tmp_path / "shards"))
    page = render_findings(check_images([images], 0, LIMIT), [images], LIMIT)
    assert page.count("data:image/jpeg;base64") >= 1
