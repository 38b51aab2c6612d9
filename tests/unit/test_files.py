import os
from pathlib import Path

import pytest

from hotloop.core.files import new_directory, recover, write_atomic


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    write_atomic(file, "old")
    write_atomic(file, b"new")
    assert file.read_text() == "new"
    assert os.listdir(tmp_path) == ["result.json"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "result.json"
    write_atomic(file, "old")

    def fails(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="No space"):
        write_atomic(file, "new")
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["result.json"]


def test_what_is_no_file_is_not_replaced_by_one(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(OSError, match="no file, but a folder or a device"):
            write_atomic(tmp_path / name, "new")
    assert (tmp_path / "pipe").is_fifo()
    assert sorted(os.listdir(tmp_path)) == ["folder", "pipe"]


def test_a_directory_appears_only_when_it_is_full(tmp_path: Path) -> None:
    with new_directory(tmp_path / "checkpoint") as temporary:
        (temporary / "state").write_text("1")
        assert not (tmp_path / "checkpoint").exists()
    assert (tmp_path / "checkpoint/state").read_text() == "1"

    def interrupted() -> None:
        with new_directory(tmp_path / "checkpoint") as temporary:
            (temporary / "state").write_text("2")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (tmp_path / "checkpoint/state").read_text() == "1"
    assert os.listdir(tmp_path) == ["checkpoint"]


@pytest.mark.parametrize("renames", [0, 1])
def test_a_process_killed_while_it_replaces_a_directory_leaves_the_old_one(tmp_path: Path, renames: int) -> None:
    path = tmp_path / "checkpoint"
    with new_directory(path) as temporary:
        (temporary / "state").write_text("old")
    child = os.fork()
    if child == 0:
        done, rename = iter(range(renames)), Path.rename
        Path.rename = lambda self, to: rename(self, to) if next(done, None) is not None else os._exit(9)  # type: ignore
        with new_directory(path) as temporary:
            (temporary / "state").write_text("new")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    recover(path)
    assert (path / "state").read_text() == "old"
    assert os.listdir(tmp_path) == ["checkpoint"]


def test_what_was_replaced_goes_even_if_the_process_was_killed_before(tmp_path: Path) -> None:
    for name in ("checkpoint", ".checkpoint.old", ".checkpoint.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state").write_text(name)
    recover(tmp_path / "checkpoint")
    assert (tmp_path / "checkpoint/state").read_text() == "checkpoint"
    assert os.listdir(tmp_path) == ["checkpoint"]
