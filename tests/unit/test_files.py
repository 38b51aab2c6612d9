import os
from pathlib import Path

import pytest

from hotloop.core.files import new_directory, write_atomic


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
