"""Checkpoints are listed, verified, and their weights taken out."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, safe_open

from hotloop import Checkpointer
from hotloop.core.errors import CheckpointError, InputError
from hotloop.train.checkpoint import convert as convert_module
from hotloop.train.checkpoint import table
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


def test_a_full_disk_is_told(newest: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensor: torch.Tensor) -> memoryview:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(convert_module, "_bytes_of", full)
    with pytest.raises(InputError, match=r"cannot write .*out.safetensors\n.*No space left.*\n.*free some space"):
        convert(newest, tmp_path / "out.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_disk_without_room_is_told_before_anything_is_written(
    newest: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.safetensors"
    out.write_text("mine")
    convert(newest, tmp_path / "same.safetensors")
    size = (tmp_path / "same.safetensors").stat().st_size
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(convert_module, "_bytes_of", lambda tensor: pytest.fail("it was begun"))
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=size - 1))
    with pytest.raises(InputError, match=rf"out.safetensors has no room\n.*{size} B, and {size - 1} B are free"):
        convert(newest, out, replace=True)
    assert out.read_text() == "mine"


@pytest.mark.parametrize(("name", "better"), [("model.pt", "model"), ("model", "model"), ("llama-3.2", "llama-3.2")])
def test_a_name_of_another_format_is_refused_with_one_that_works(
    newest: Loaded, tmp_path: Path, name: str, better: str
) -> None:  # fmt: skip
    with pytest.raises(InputError, match="is no name for them") as told:
        convert(newest, tmp_path / name)
    assert told.value.fix.endswith(f"{newest.path} {tmp_path}/{better}.safetensors")
    assert not (tmp_path / name).exists()


def test_a_place_that_cannot_be_written_to_is_told_without_temporary_names(newest: Loaded, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for out, cause, fix in (
        (
            tmp_path / "my models/m.safetensors",
            f"there is no folder {tmp_path}/my models",
            f"mkdir -p '{tmp_path}/my models'",
        ),
        (tmp_path / "file/m.safetensors", f"there is no folder {tmp_path}/file", f"{newest.path} ~/m.safetensors"),
    ):
        with pytest.raises(InputError) as told:
            convert(newest, out)
        assert (told.value.what, told.value.cause) == (f"{out} cannot be written", cause)
        assert told.value.fix.endswith(fix)


def test_each_checkpoint_is_listed_with_its_damage(checkpoints: Path) -> None:
    file = checkpoints / "epoch-0000-step-00000002" / "state.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))
    listed = list(stored_checkpoints(checkpoints))
    assert [(one.position, one.damage) for one in listed] == [((0, 1), None), ((0, 2), None), ((0, 3), None)]
    assert all(one.size_bytes > len(content) for one in listed)
    whole, damaged, other = stored_checkpoints(checkpoints, verify=True)
    assert (whole.damage, other.damage) == ("", "")
    assert "state.pt is not what was written (SHA-256 " in str(damaged.damage)
    [one] = stored_checkpoints(listed[2].path, verify=True)
    assert (one.position, one.damage) == ((0, 3), "")


def test_where_there_is_none_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no checkpoint at"):
        list(stored_checkpoints(tmp_path))


def test_those_that_are_set_aside_are_named(checkpoints: Path) -> None:
    for path in sorted(checkpoints.iterdir()):
        path.rename(path.with_name(f"damaged-{path.name}"))
    for look in (lambda: list(stored_checkpoints(checkpoints)), lambda: named_checkpoint(checkpoints)):
        with pytest.raises(
            CheckpointError, match=r"all 3 checkpoints in .* are set aside\n.*damaged-epoch-0000-step-0"
        ):
            look()


def test_one_that_a_training_removes_meanwhile_is_left_out(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verify = table.verify_checkpoint

    def removed(path: Path) -> Any:
        if path.name.endswith("1"):
            shutil.rmtree(path)
            shutil.rmtree(checkpoints / "epoch-0000-step-00000002")
        return verify(path)

    monkeypatch.setattr(table, "verify_checkpoint", removed)
    assert [(one.position, one.damage) for one in stored_checkpoints(checkpoints, verify=True)] == [((0, 3), "")]


def test_a_checkpoint_is_one_whatever_its_folder_is_called(checkpoints: Path, tmp_path: Path) -> None:
    best = (checkpoints / "epoch-0000-step-00000003").rename(tmp_path / "best")
    assert [(one.position, one.damage) for one in stored_checkpoints(best, verify=True)] == [((0, 3), "")]
    (best / "manifest.json").write_text("[]")
    [damaged] = stored_checkpoints(best, verify=True)
    assert damaged.damage


def test_large_tensors_of_all_types_are_read_one_by_one(tmp_path: Path) -> None:
    large = torch.arange(20_000).remainder(251)
    dtypes = (torch.bool, torch.int8, torch.bfloat16, torch.float8_e4m3fn, torch.float64)
    model = {str(dtype): large.to(dtype) for dtype in dtypes} | {"none": torch.zeros(0, 3), "one": torch.tensor(1.0)}
    Checkpointer(tmp_path).save({"model": model}, 1)
    assert convert(named_checkpoint(tmp_path, lazily=True), tmp_path / "out.safetensors") == 7
    found = load_file(tmp_path / "out.safetensors")
    assert found.keys() == model.keys()
    for name, tensor in model.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name].float(), tensor.float())


def test_a_type_that_the_format_has_not_is_told(tmp_path: Path) -> None:
    Checkpointer(tmp_path).save({"model": {"odd": torch.zeros(3, dtype=torch.complex128)}}, 1)
    with pytest.raises(InputError, match=r"hold no torch\.complex128"):
        convert(named_checkpoint(tmp_path), tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()
