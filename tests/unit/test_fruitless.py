"""Starts that save nothing: how many in a row are the last."""

import json
from pathlib import Path

import pytest

from hotloop.core.errors import InputError
from hotloop.launch.fruitless import MOST, count_start


def test_starts_that_save_nothing_come_to_an_end_and_one_that_saves_begins_anew(tmp_path: Path) -> None:
    file, checkpoints = tmp_path / ".launch/line/starts.json", tmp_path / "line/checkpoints"
    for _ in range(MOST):
        count_start(file, checkpoints)
    with pytest.raises(InputError, match="5 starts in a row have saved nothing"):
        count_start(file, checkpoints)
    (checkpoints / "epoch-0001-step-00000010").mkdir(parents=True)
    count_start(file, checkpoints)
    (checkpoints / ".epoch-0002-step-00000020.unfinished").mkdir()
    for _ in range(MOST - 1):
        count_start(file, checkpoints)
    with pytest.raises(InputError):
        count_start(file, checkpoints)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"saved": 1, "fruitless": 9}', '{"saved": [], "fruitless": "x"}'])
def test_a_note_that_cannot_be_read_counts_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / "starts.json").write_text(content)
    count_start(tmp_path / "starts.json", tmp_path / "checkpoints")
    assert json.loads((tmp_path / "starts.json").read_text())["fruitless"] == 0


def test_a_place_that_cannot_be_written_stops_no_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    count_start(tmp_path / "file/starts.json", tmp_path / "checkpoints")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
