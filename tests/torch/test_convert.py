"""Checkpoints are listed, verified, and their weights taken out."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, safe_open

from hotloop import Checkpointer
from hotloop.core.errors import InputError
from hotloop.train.checkpoint.checkpointer import Loaded, named_checkpoint
from hotloop.train.checkpoint.convert import ALL, AVERAGED, MODEL, convert
from hotloop.train.checkpoint.table import stored_checkpoints


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """Three, of a loop of one's own, with tied weights and a part of another tensor."""
    folder = tmp_path / "mine"
    folder.mkdir()
    for step in (1, 2, 3):
        table = torch.arange(6.0).view(2, 3) * step
        model = {"a": table, "tied": table, "part": table[0], "turned": table.T}
        Checkpointer(folder, keep=3).save({"model": model, "step": step}, step)
    return folder


@pytest.fixture
def newest(checkpoints: Path) -> Loaded:
    return named_checkpoint(checkpoints)


@pytest.mark.parametrize(("weights", "prefix"), [(MODEL, ""), (ALL, "model.")])
def test_tensors_are_written_whole_and_apart(newest: Loaded, tmp_path: Path, weights: str, prefix: str) -> None:
    convert(newest, tmp_path / "out.safetensors", weights)
    found = {name: tensor.tolist() for name, tensor in load_file(tmp_path / "out.safetensors").items()}
    table = [[0, 3, 6], [9, 12, 15]]
    expected = {"a": table, "tied": table, "part": table[0], "turned": [[0, 9], [3, 12], [6, 15]]}
    assert found == {prefix + name: values for name, values in expected.items()}
    with safe_open(tmp_path / "out.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "epoch": "0", "step": "3", "weights": weights}


def test_nothing_is_written_over_or_made_up(newest: Loaded, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    out.write_text("mine")
    with pytest.raises(InputError, match="is there already"):
        convert(newest, out)
    assert out.read_text() == "mine"
    convert(newest, out, replace=True)
    assert "a" in load_file(out)
    with pytest.raises(InputError, match="no tensors of this kind"):
        convert(newest, tmp_path / "new.safetensors", AVERAGED)
    assert not (tmp_path / "new.safetensors").exists()


def test_each_checkpoint_is_listed_with_its_damage(checkpoints: Path) -> None:
    file = checkpoints / "epoch-0000-step-00000002" / "state.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))
    listed = stored_checkpoints(checkpoints)
    assert [(one.position, one.damage) for one in listed] == [((0, 1), None), ((0, 2), None), ((0, 3), None)]
    assert all(one.size_bytes > len(content) for one in listed)
    whole, damaged, other = stored_checkpoints(checkpoints, verify=True)
    assert (whole.damage, other.damage) == ("", "")
    assert "expected" in str(damaged.damage)
    [one] = stored_checkpoints(listed[2].path, verify=True)
    assert (one.position, one.damage) == ((0, 3), "")


def test_where_there_is_none_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no checkpoint at"):
        stored_checkpoints(tmp_path)
