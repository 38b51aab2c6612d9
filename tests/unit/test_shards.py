"""Images in tar shards."""

import io
import json
import os
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pictures import write_image

from hotloop.core.errors import DamagedSample, InputError
from hotloop.data import index, shards
from hotloop.data.check import check_images
from hotloop.data.image_list import find_images
from hotloop.data.images import ImageFiles, RandomCrop
from hotloop.data.loader import Loaders, LoaderSettings


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def write_shards(folder: Path, each: int = 4, label: str = "cls") -> list[str]:
    """Two shards; classes 2 and 10 in turns, so that they sort by value. Returns the images' names."""
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    for shard in range(2):
        with tarfile.open(folder / f"part-{shard:03d}.tar", "w") as tar:
            for number in range(each):
                key = f"deep/{shard}-{number}.v1"
                image = write_image(folder / "x.png", 10 * shard + number).read_bytes()
                name = 10 if number % 2 else 2
                text = {"cls": f"{name}\n", "json": json.dumps({"label": name, "width": 1})}[label]
                add(tar, f"deep/{shard}-{number}.{label}", text.encode())
                add(tar, f"deep/{shard}-{number}.png", image)
                names.append(f"part-{shard:03d}.tar/deep/{shard}-{number}.png")
                add(tar, f"{key}.txt", b"a caption")
    (folder / "x.png").unlink()
    return names


@pytest.mark.parametrize("label", ["cls", "json"])
@pytest.mark.parametrize("location", ["", "part-{000..001}.tar"])
def test_shards_hold_what_was_put_in(tmp_path: Path, label: str, location: str) -> None:
    names = write_shards(tmp_path / "data", label=label)
    images = find_images(str(tmp_path / "data" / location))
    assert list(images.names) == names
    assert images.classes == (("2", "10") if label == "cls" else ("10", "2")), "numbers by value, names as folders"
    assert images.labels.array.tolist() == ([0, 1] if label == "cls" else [1, 0]) * 4
    expected = write_image(tmp_path / "y.png", 11).read_bytes()
    assert images.read(5) == expected


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("a.tar", ["a.tar"]),
        ("a-{08..10}.tar", ["a-08.tar", "a-09.tar", "a-10.tar"]),
        ("{0..1}-{1..2}.tar", ["0-1.tar", "0-2.tar", "1-1.tar", "1-2.tar"]),
        ("a-{2..1}.tar", "means 0 shards"),
        ("{0..99999}-{0..99999}.tar", "means 10,000,000,000 shards"),
    ],
)
def test_ranges_are_written_out(name: str, meant: list[str] | str) -> None:
    if isinstance(meant, list):
        assert shards.expanded(name) == meant
    else:
        with pytest.raises(InputError, match=meant):
            shards.expanded(name)


def test_a_shard_that_is_not_there_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path)
    with pytest.raises(InputError, match="3 files, of which 1 cannot be found") as told:
        find_images(str(tmp_path / "part-{000..002}.tar"))
    assert "part-002.tar" in str(told.value)


def test_a_class_of_a_thousand_digits_is_a_name(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for number, label in enumerate(("9" * 5000, "10", "2")):
            add(tar, f"{number}.png", write_image(tmp_path / "x.png", number).read_bytes())
            add(tar, f"{number}.cls", label.encode())
    assert find_images(str(tmp_path / "a.tar")).classes == ("10", "2", "9" * 5000)


def test_a_class_in_json_that_is_nested_without_end_is_none(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        add(tar, "1.png", write_image(tmp_path / "x.png", 1).read_bytes())
        add(tar, "1.json", b"[" * 100_000)
    with pytest.raises(InputError, match=r"1\.png has no class"):
        find_images(str(tmp_path / "a.tar"))


def test_one_shard_is_a_data_set_too(tmp_path: Path) -> None:
    write_shards(tmp_path)
    assert len(find_images(str(tmp_path / "part-001.tar"))) == 4


def test_what_macos_puts_beside_each_file_is_left_out(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for number in range(2):
            for name, content in ((f"{number}.png", b"x"), (f"{number}.cls", str(number).encode())):
                add(tar, f"./._{name}", b"attributes")
                add(tar, f"./{name}", content)
    images = find_images(str(tmp_path / "a.tar"))
    assert list(images.names) == ["a.tar/./0.png", "a.tar/./1.png"]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_from_shards_are_those_from_files(tmp_path: Path, workers: int) -> None:
    names = write_shards(tmp_path / "shards")
    rows = ["path,label"]
    images = find_images(str(tmp_path / "shards"))
    for number, name in enumerate(names):
        (tmp_path / f"{number:02d}.png").write_bytes(images.read(number))
        rows.append(f"{number:02d}.png,{10 if number % 2 else 2}")
        assert name.endswith(".png")
    (tmp_path / "list.csv").write_text("\n".join(rows))
    settings = LoaderSettings(3, seed=1)
    crop = RandomCrop((0.3, 1.0), (0.8, 1.2), 0.5)
    sets = [
        ImageFiles(find_images(str(place)), 8, crop, 10**6) for place in (tmp_path / "shards", tmp_path / "list.csv")
    ]
    with Loaders([(data, settings) for data in sets], workers) as (one, other):
        for first, second in zip(one.batches(), other.batches(), strict=True):
            assert np.array_equal(first.arrays["images"], second.arrays["images"])


def test_a_folder_with_a_stray_archive_is_still_one_of_classes(make_images: Callable[..., Path]) -> None:
    folder = make_images(classes=2, each=1)
    with tarfile.open(folder / "old.tar", "w") as tar:
        add(tar, "a.png", b"")
    assert find_images(str(folder)).spans is None


def test_the_index_serves_until_a_shard_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(index, "_SETTLED_NS", 0)
    write_shards(tmp_path / "data")
    first = find_images(str(tmp_path / "data"))
    with monkeypatch.context() as patched:
        patched.setattr(shards, "tarfile", None)
        second = find_images(str(tmp_path / "data"))
    assert second.read(3) == first.read(3)
    assert second.fingerprint() == first.fingerprint()
    write_shards(tmp_path / "data", each=6)
    assert len(find_images(str(tmp_path / "data"))) == 12


def bad_shards(folder: Path) -> dict[str, tuple[str, str]]:
    """Each kind of bad shards: what is asked for, and what the error says."""
    write_shards(folder / "good")
    (folder / "broken.tar").write_bytes(b"no tar" * 500)
    whole = (folder / "good/part-000.tar").read_bytes()
    (folder / "cut.tar").write_bytes(whole[: len(whole) // 2 - 100])
    with tarfile.open(folder / "good/part-000.tar") as tar:
        middle = tar.getmembers()[6].offset
    (folder / "header.tar").write_bytes(whole[: middle + 100] + b"\xff" + whole[middle + 101 :])
    (folder / "boundary.tar").write_bytes(whole[:middle])
    (folder / "joined.tar").write_bytes(whole + (folder / "good/part-001.tar").read_bytes())
    with tarfile.open(folder / "twice.tar", "w") as tar:
        for _ in range(2):
            add(tar, "a.png", b"x")
            add(tar, "b.cls", b"1")
    with tarfile.open(folder / "link.tar", "w") as tar:
        add(tar, "a.png", b"x")
        add(tar, "a.cls", b"1")
        link = tarfile.TarInfo("b.png")
        link.type, link.linkname = tarfile.LNKTYPE, "a.png"
        tar.addfile(link)
    for name, member in (("unlabelled", "a.png"), ("empty", "a.txt")):
        with tarfile.open(folder / f"{name}.tar", "w") as tar:
            add(tar, member, b"x")
    with tarfile.open(folder / "vague.tar", "w") as tar:
        add(tar, "a.png", b"x")
        add(tar, "a.json", b'{"caption": "a cat"}')
    with tarfile.open(folder / "dotted.tar", "w") as tar:
        add(tar, "my.photo.png", b"x")
        add(tar, "my.cls", b"1")
    (folder / "linked").mkdir()
    for name in ("a.tar", "b.tar"):
        (folder / "linked" / name).symlink_to(folder / "good/part-000.tar" if name == "a.tar" else "/nowhere/b.tar")
    return {
        "compressed": (str(folder / "a.tar.gz"), "is compressed"),
        "missing": (str(folder / "good/part-{000..003}.tar"), "part-002.tar"),
        "broken": (str(folder / "broken.tar"), "cannot be read"),
        "cut": (str(folder / "cut.tar"), "cannot be read"),
        "header": (str(folder / "header.tar"), "cannot be read"),
        "boundary": (str(folder / "boundary.tar"), "cannot be read"),
        "joined": (str(folder / "joined.tar"), "goes on after its end"),
        "twice": (str(folder / "twice.tar"), "holds a.png twice"),
        "link": (str(folder / "link.tar"), "b.png is a link"),
        "many": (str(folder / "x-{0..999999999}.tar"), "1,000,000,000 shards"),
        "reversed": (str(folder / "x-{5..3}.tar"), "means 0 shards"),
        "unlabelled": (str(folder / "unlabelled.tar"), "a.png has no class"),
        "vague": (str(folder / "vague.tar"), "a.png has no class"),
        "dotted": (str(folder / "dotted.tar"), "my.photo.png is not taken for an image"),
        "empty": (str(folder / "empty.tar"), "has 0 classes"),
        "absent": (str(folder / "absent.tar"), "no shard"),
        "link to nowhere": (str(folder / "linked"), "b.tar is no file"),
    }


KINDS = ["compressed", "missing", "broken", "cut", "header", "boundary", "joined", "twice", "link", "many"]
KINDS += ["reversed", "unlabelled", "vague", "dotted", "empty", "absent", "link to nowhere"]


@pytest.mark.parametrize("kind", KINDS)
def test_bad_shards_are_refused_with_their_reason(tmp_path: Path, kind: str) -> None:
    location, text = bad_shards(tmp_path)[kind]
    with pytest.raises(InputError) as caught:
        find_images(location)
    assert text in caught.value.what
    assert str(caught.value).count("\n") == 2


def test_a_shard_that_shrinks_or_goes_during_the_run_is_damage(tmp_path: Path) -> None:
    write_shards(tmp_path)
    images = find_images(str(tmp_path))
    with (tmp_path / "part-001.tar").open("r+b") as file:
        file.truncate(2000)
    with pytest.raises(DamagedSample, match=r"part-001\.tar/deep/1-3\.png"):
        images.read(7)
    (tmp_path / "part-000.tar").unlink()
    with pytest.raises(DamagedSample, match="No such file"):
        images.read(0)
    findings = check_images([images], 0, 10**6)
    assert len(findings.damaged) >= 5


def test_a_shard_is_opened_once_for_all_its_images(tmp_path: Path) -> None:
    """On a network disk an open costs more than the image, and in an epoch's order each image lies in another shard."""
    write_shards(tmp_path)
    images = find_images(str(tmp_path))
    opened: list[str] = []
    listening = True

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if listening and event == "open" and str(arguments[0]).startswith(str(tmp_path)):
            opened.append(str(arguments[0]))

    sys.addaudithook(hear)
    order = np.random.default_rng(0).permutation(len(images)).tolist()
    contents = [images.read(number) for number in [*order, *order]]
    listening = False
    assert contents[: len(order)] == contents[len(order) :]
    assert len(opened) == len(set(opened)) == len(list(tmp_path.glob("*.tar")))


def test_a_shard_that_was_open_is_opened_anew_after_an_error(tmp_path: Path) -> None:
    """Of a network disk that has come back, what was open before is read no more."""
    write_shards(tmp_path)
    images = find_images(str(tmp_path))
    expected = [images.read(number) for number in range(len(images))]
    for shard in tmp_path.glob("*.tar"):
        (kept,) = [int(one.name) for one in Path("/proc/self/fd").iterdir() if os.path.realpath(one) == str(shard)]
        unread = os.open(shard, os.O_PATH)  # its state can be asked for, each read of it fails
        os.dup2(unread, kept, inheritable=False)
        os.close(unread)
    assert [images.read(number) for number in range(len(images))] == expected


def test_a_shard_is_not_taken_for_another_that_a_link_leads_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(index, "_SETTLED_NS", 0)
    write_shards(tmp_path / "y")
    (tmp_path / "x").mkdir()
    (tmp_path / "x/a.tar").symlink_to(tmp_path / "y/part-001.tar")
    expected = find_images(str(tmp_path / "y/part-001.tar")).read(0)
    through = find_images(str(tmp_path / "x/a.tar"))
    assert through.read(0) == expected


def test_other_pixels_at_the_same_names_are_other_data(tmp_path: Path) -> None:
    write_shards(tmp_path / "a")
    write_shards(tmp_path / "b")
    with tarfile.open(tmp_path / "b/part-001.tar", "w") as tar:
        for number in range(4):
            add(tar, f"deep/1-{number}.cls", b"10" if number % 2 else b"2")
            add(tar, f"deep/1-{number}.png", b"shorter")
    prints = [find_images(str(tmp_path / name)).fingerprint() for name in ("a", "b")]
    assert prints[0] != prints[1]
