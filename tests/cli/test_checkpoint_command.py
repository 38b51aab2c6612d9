"""`hotloop checkpoint` on what a run has saved."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command import Command
from safetensors.torch import load_file

from hotloop import Checkpointer
from hotloop.train.checkpoint.checkpointer import load_checkpoint

JOB = """
task = {{ name = "images", image_size = 16 }}
data = {{ train = "{folder}", batch_size = 4 }}
model = {{ name = "tiny:perceptron" }}
train = {{ epochs = 2, ema = 0.9 }}
optimizer = {{ learning_rate = 1e-4 }}
checkpoint = {{ every = "1 epoch" }}
run = {{ dir = "run" }}
"""


@pytest.mark.slow
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
    newest = load_checkpoint(tmp_path / listed[-1]["path"]).state
    assert weights.keys() == newest["step"]["model"].keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in newest["step"]["model"].items())
    assert averaged.keys() == weights.keys()
    assert any(not torch.equal(tensor, weights[name]) for name, tensor in averaged.items())
    damaged = tmp_path / listed[0]["path"] / "state.pt"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    told = hotloop("checkpoint", "verify", "run", expect=1).out.splitlines()
    assert ["damaged: state.pt has " in told[0], told[1].endswith("whole")] == [True, True]
    done = hotloop("checkpoint", "convert", "run", "model.safetensors", expect=2)
    assert "is there already" in done.err


def test_damage_and_a_folder_that_is_not_there_are_told_in_words(tmp_path: Path, hotloop: Command) -> None:
    for step in (1, 2):
        Checkpointer(tmp_path).save({"model": {"large": torch.zeros(100_000)}}, step)
    refused = hotloop("checkpoint", "convert", ".", "missing/m.safetensors", expect=2)
    assert refused.err.splitlines() == [
        "error: missing/m.safetensors cannot be written",
        "cause: there is no folder missing",
        "fix:   mkdir -p missing",
    ]
    (tmp_path / "missing").mkdir()
    hotloop("checkpoint", "convert", ".", "missing/m.safetensors", expect=0)
    part = "part-00001-of-00001.safetensors"
    (tmp_path / "epoch-0000-step-00000001" / part).unlink()
    cut = tmp_path / "epoch-0000-step-00000002" / part
    size = cut.stat().st_size
    os.truncate(cut, size - 1)
    first, second = hotloop("checkpoint", "verify", ".", expect=1).out.splitlines()
    assert first.endswith(f"  damaged: {part} is missing")
    assert second.endswith(f"  damaged: {part} has {size - 1:,} bytes, {size:,} were written")
