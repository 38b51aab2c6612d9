"""The folder that a profile is written into."""

import os
from pathlib import Path
from typing import Any

import pytest

from hotloop.core.errors import InputError
from hotloop.profile import script
from hotloop.profile.folder import next_folder
from hotloop.profile.plan import Plan
from hotloop.profile.script import profile_script


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("python train.py --epochs 3", "train-1"),
        ("python -m torch.distributed.run -m pkg.train", "train-1"),
        ("python -m torch.distributed.run examples/fit.py", "fit-1"),
        ("bin/train --fast", "train-1"),
    ],
)
def test_it_has_the_name_of_what_trains(tmp_path: Path, command: str, name: str) -> None:
    assert next_folder(tmp_path, command.split()) == tmp_path / name


def test_a_command_in_a_shells_words_gives_its_name_too(tmp_path: Path) -> None:
    assert next_folder(tmp_path, ["bash", "-c", "cd here && python train.py"]) == tmp_path / "train-1"


def test_interrupted_while_it_concludes_it_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Enough:
        is_enough, left_out = True, ()

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(script, "read_measured", lambda folder: [Enough()])
    monkeypatch.setattr(script, "conclude", interrupted)
    with pytest.raises(KeyboardInterrupt):
        profile_script(["true"], Plan(), os.environ, tmp_path / "profiles/train-1")
    assert not list(tmp_path.iterdir())


def test_where_it_cannot_be_made_another_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="Not a directory") as refused:
        profile_script(["true"], Plan(), os.environ, tmp_path / "file/x")
    assert "--out FOLDER" in str(refused.value)
