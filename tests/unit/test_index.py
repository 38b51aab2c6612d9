"""Lists of many files: kept in an index, found anew when something changed."""

import fcntl
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread, current_thread
from typing import BinaryIO

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.core.errors import InputError
from hotloop.data import index
from hotloop.data.columns import Column, Texts
from hotloop.data.image_list import find_images
from hotloop.data.images import CenterCrop, ImageFiles
from hotloop.data.index import indexed
from hotloop.data.listing import Listing

names = st.text(st.characters(codec="utf-8"), max_size=8) | st.binary(max_size=5).map(os.fsdecode)


@given(texts=st.lists(names, max_size=20))
def test_texts_come_back_as_they_were(texts: list[str]) -> None:
    packed = Texts.of(texts)
    assert list(packed) == texts
    assert packed[:] == texts
    assert packed[-3:1] == texts[-3:1]
    assert list(pickle.loads(pickle.dumps(packed))) == texts
    with pytest.raises(IndexError):
        packed[len(texts)]


def test_a_column_in_a_file_travels_as_its_name(tmp_path: Path) -> None:
    column = Column(np.arange(100_000))
    column.write(tmp_path / "numbers.npy")
    sent = pickle.dumps(Column.open(str(tmp_path / "numbers.npy")))
    assert len(sent) < 500
    assert np.array_equal(pickle.loads(sent).array, column.array)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An index is written for any number of files, in folders of any age."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(index, "_FROM", 1)
    monkeypatch.setattr(index, "_SETTLED_NS", 0)
    return tmp_path / "cache/hotloop/index"


def later(*folders: Path) -> None:
    """A change that the clock of the file system shows."""
    for folder in folders:
        state = folder.stat()
        os.utime(folder, ns=(state.st_atime_ns, state.st_mtime_ns + 10**9))


def test_the_second_time_nothing_is_scanned(
    cache: Path, make_images: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_images(classes=2, each=3)
    first = find_images(str(folder))
    monkeypatch.setattr(os, "walk", None)
    second = find_images(str(folder))
    assert list(second.names) == list(first.names)
    assert second.labels.array.tolist() == first.labels.array.tolist()
    assert len(pickle.dumps(second)) < 1500, "it travels as the names of its columns"
    fingerprints = [ImageFiles(images, 8, CenterCrop(1.0), 100).fingerprint() for images in (first, second)]
    assert fingerprints[0] == fingerprints[1]


@pytest.mark.parametrize("change", ["a new file", "a new class", "a file less", "a file deep inside"])
def test_a_change_is_found(cache: Path, make_images: Callable[..., Path], change: str) -> None:
    folder = make_images(classes=2, each=3)
    (folder / "class1/deep").mkdir()
    os.link(folder / "class1/000.png", folder / "class1/deep/a.png")
    before = find_images(str(folder))
    source = folder / "class0/000.png"
    if change == "a new file":
        os.link(source, folder / "class0/new.png")
    elif change == "a new class":
        (folder / "class9").mkdir()
        os.link(source, folder / "class9/a.png")
    elif change == "a file less":
        source.unlink()
    else:
        os.link(source, folder / "class1/deep/b.png")
    later(folder, folder / "class0", folder / "class1/deep")
    after = find_images(str(folder))
    assert len(after) == len(before) + (-1 if change == "a file less" else 1)


def test_a_list_is_kept_until_it_is_written_anew(cache: Path, make_images: Callable[..., Path]) -> None:
    folder = make_images(classes=2, each=1)
    file = folder / "list.csv"
    file.write_text("path,label\nclass0/000.png,cat\nclass1/000.png,dog\n")
    first = find_images(str(file))
    assert find_images(str(file), ("dog", "cat")).labels.array.tolist() == [1, 0], "other numbers, the same index"
    assert len(list(cache.glob("*/newest.json"))) == 1
    file.write_text("path,label\nclass0/000.png,dog\nclass1/000.png,cat\n")
    later(file)
    assert find_images(str(file)).labels.array.tolist() == [1, 0] != first.labels.array.tolist()


def test_moved_data_is_the_same_data(cache: Path, make_images: Callable[..., Path]) -> None:
    folder = make_images(classes=2, each=2)
    before = ImageFiles(find_images(str(folder)), 8, CenterCrop(1.0), 100)
    moved = folder.rename(folder.with_name("moved"))
    after = ImageFiles(find_images(str(moved)), 8, CenterCrop(1.0), 100)
    assert before.fingerprint() == after.fingerprint()
    assert after.name(0).startswith(str(moved))


def test_a_damaged_index_is_made_anew(cache: Path, make_images: Callable[..., Path]) -> None:
    folder = make_images(classes=2, each=2)
    expected = list(find_images(str(folder)).names)
    for file in cache.rglob("*.npy"):
        file.write_bytes(b"")
    assert list(find_images(str(folder)).names) == expected
    for file in cache.rglob("newest.json"):
        file.write_text("{}")
    assert list(find_images(str(folder)).names) == expected


def test_a_folder_that_was_just_written_is_not_trusted(
    cache: Path, make_images: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "_SETTLED_NS", 3600 * 10**9)
    find_images(str(make_images(classes=2, each=2)))
    assert not cache.exists()


def test_without_a_place_for_it_there_is_no_index(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "file").write_text("")
    listing = Listing(Texts.of(["a"]), Column(np.zeros(1, np.int32)), ("x",), {})
    assert indexed(tmp_path, lambda: listing, cache=tmp_path / "file") is listing


def test_one_that_is_being_written_is_left_to_who_began(
    cache: Path, make_images: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the ranks of a job do, a second reader comes when the first has begun to write."""
    folder, write, lock = str(make_images(classes=2, each=2)), Column.write, fcntl.flock
    found, waits_or_done = [], Event()

    def second() -> None:
        found.append(find_images(folder))
        waits_or_done.set()

    def locked(file: BinaryIO, how: int) -> None:
        if current_thread() is other:
            waits_or_done.set()
        lock(file, how)

    def begun(column: Column, file: Path) -> None:
        if not other.ident:
            other.start()
            waits_or_done.wait()
        write(column, file)

    other = Thread(target=second)
    monkeypatch.setattr(fcntl, "flock", locked)
    monkeypatch.setattr(Column, "write", begun)
    found.append(find_images(folder))
    other.join()
    files = {images.labels.file for images in found}
    assert len(files) == 1, "both map the same"
    assert Path(files.pop()).is_file()


def test_an_index_that_a_run_began_with_stays_for_a_day(cache: Path, make_images: Callable[..., Path]) -> None:
    folder = make_images(classes=2, each=2)
    began = find_images(str(folder))
    (columns,) = [path for path in cache.glob("*/*") if path.is_dir()]
    os.utime(columns, (0, 0))  # written long ago
    os.link(folder / "class0/000.png", folder / "class0/new.png")
    assert len(find_images(str(folder))) == len(began) + 1
    assert len([path for path in cache.glob("*/*") if path.is_dir()]) == 2
    assert list(pickle.loads(pickle.dumps(began)).names) == list(began.names), "a worker that starts now finds it"


def test_an_unreadable_folder_is_an_error(
    cache: Path, make_images: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_images(classes=2, each=2)
    (folder / "class0/deep").mkdir()
    scan = os.scandir

    def refusing(path: str) -> object:
        if str(path).endswith("deep"):
            raise PermissionError(13, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(InputError, match="cannot look into"):
        find_images(str(folder))


@pytest.mark.parametrize("content", ["[]", '{"watched": []}', "{", ""])
def test_an_index_of_another_shape_is_made_anew(cache: Path, make_images: Callable[..., Path], content: str) -> None:
    folder = make_images(classes=2, each=2)
    expected = list(find_images(str(folder)).names)
    for file in cache.rglob("newest.json"):
        file.write_text(content)
    assert list(find_images(str(folder)).names) == expected


def test_a_comma_in_a_path_of_a_list_has_to_be_quoted(tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text("path,label\na,b.jpg,cat\nc.jpg,dog\n")
    with pytest.raises(InputError, match="line 2 has more columns"):
        find_images(str(tmp_path / "list.csv"))
