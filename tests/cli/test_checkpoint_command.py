"""`hotloop checkpoint` on what a run and a loop of one's own have saved."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command import Command
from safetensors.torch import load_file, safe_open

from hotloop import Checkpointer

JOB = """
task = {{ name = "images", image_size = 16 }}
data = {{ train = "{folder}", batch_size = 4 }}
model = {{ name = "tiny:perceptron" }}
train = {{ epochs = 2, ema = 0.9 }}
optimizer = {{ learning_rate = 1e-4 }}
checkpoint = {{ every = "1 epoch" }}
run = {{ dir = "run" }}
"""


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """Three, of a loop of one's own."""
    folder = tmp_path / "mine"
    folder.mkdir()
    shared = torch.arange(6.0).view(2, 3)
    for step in (1, 2, 3):
        state = {"model": {"a": shared * step, "tied": shared * step, "part": shared[0]}, "step": step}
        state["model"]["tied"] = state["model"]["a"]
        Checkpointer(folder, keep=3).save(state, step)
    return folder


def test_a_run_is_listed_verified_and_its_weights_taken_out(
    tmp_path: Path, hotloop: Command, make_images: Callable[..., Path]
) -> None:
    (tmp_path / "job.toml").write_text(JOB.format(folder=make_images()))
    hotloop("train", "job.toml", expect=0)
    listed = json.loads(hotloop("checkpoint", "list", "run", "--json", expect=0).out)["checkpoints"]
    assert [(one["epoch"], "damage" in one) for one in listed] == [(1, False), (2, False)]
    verified = json.loads(hotloop("checkpoint", "verify", "run", "--json", expect=0).out)["checkpoints"]
    assert [one["damage"] for one in verified] == ["", ""]
    hotloop("checkpoint", "convert", "run", "model.safetensors", expect=0)
    hotloop("checkpoint", "convert", "run", "averaged.safetensors", "--weights", "averaged", expect=0)
    weights, averaged = (load_file(tmp_path / name) for name in ("model.safetensors", "averaged.safetensors"))
    newest = torch.load(tmp_path / listed[-1]["path"] / "state.pt", weights_only=True)
    assert weights.keys() == newest["step"]["model"].keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in newest["step"]["model"].items())
    assert averaged.keys() == weights.keys()
    assert any(not torch.equal(tensor, weights[name]) for name, tensor in averaged.items())


def test_tied_weights_and_parts_are_written_whole(checkpoints: Path, hotloop: Command) -> None:
    hotloop("checkpoint", "convert", str(checkpoints), "all.safetensors", "--weights", "all", expect=0)
    found = load_file(checkpoints.parent / "all.safetensors")
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        "model.a": [[0, 3, 6], [9, 12, 15]], "model.tied": [[0, 3, 6], [9, 12, 15]], "model.part": [0, 1, 2],
    }  # fmt: skip
    with safe_open(checkpoints.parent / "all.safetensors", "pt") as file:
        assert file.metadata()["step"] == "3"


def test_damage_is_told_by_the_exit_code(checkpoints: Path, hotloop: Command) -> None:
    damaged = checkpoints / "epoch-0000-step-00000002" / "state.pt"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(bytes(content))
    done = hotloop("checkpoint", "verify", str(checkpoints), expect=1)
    told = [line.split()[-1] if line.endswith("whole") else "damaged" for line in done.out.splitlines()]
    assert told == ["whole", "damaged", "whole"]
    assert "expected" in done.out
    one = hotloop("checkpoint", "verify", str(checkpoints / "epoch-0000-step-00000003"), "--json", expect=0)
    assert [each["step"] for each in json.loads(one.out)["checkpoints"]] == [3]


def test_nothing_is_written_over_or_made_up(checkpoints: Path, hotloop: Command, tmp_path: Path) -> None:
    newest = str(checkpoints / "epoch-0000-step-00000003")
    (tmp_path / "out.safetensors").write_text("mine")
    done = hotloop("checkpoint", "convert", newest, "out.safetensors", expect=2)
    assert "is there already" in done.err
    assert (tmp_path / "out.safetensors").read_text() == "mine"
    done = hotloop("checkpoint", "convert", newest, "new.safetensors", "--weights", "averaged", expect=2)
    assert "no tensors of this kind" in done.err
    assert not (tmp_path / "new.safetensors").exists()
    hotloop("checkpoint", "convert", newest, "out.safetensors", "--force", expect=0)
    assert "model" not in load_file(tmp_path / "out.safetensors")
    done = hotloop("checkpoint", "list", str(tmp_path), expect=2)
    assert "no checkpoint at" in done.err
