"""Runs of `hotloop train`: what they have left, and their processes while they go on."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as torch_checkpoint

from hotloop.core.tensorboard import without_tensorflow
from hotloop.train.checkpoint.checkpointer import load_checkpoint

SUPPORT = Path(__file__).parent

SMALL_JOB = """
name = "small"
device = "cpu"
model.name = "tiny:perceptron"
[task]
image_size = 16
[data]
train = "images"
val = "images"
batch_size = 4
[train]
epochs = 3
[log]
every = 1
tensorboard = false
report = false
[optimizer]
learning_rate = 0.01
"""

RESNET_JOB = """
name = "tuned"
device = "cpu"
[task]
image_size = 32
[data]
train = "{images}"
batch_size = 8
[model]
name = "resnet10t"
[log]
tensorboard = false
report = false
"""

TOKENS_JOB = """
name = "text"
device = "cpu"
[task]
name = "tokens"
context = 16
vocabulary = 64
[data]
train = "tokens.npy"
val = "tokens.npy"
batch_size = 6
workers = 0
[model]
name = "gpt2"
arguments = { layers = 2, width = 32, heads = 2, kv_heads = 2, hidden = 64 }
[train]
epochs = 2
clip_norm = 0.5
[schedule]
name = "constant"
[optimizer]
learning_rate = 0.003
[log]
every = 1
tensorboard = false
report = false
"""
EARLY = ["--set", "train.clip_norm=0", "--set", "schedule.warmup=8 steps"]
"""What lets `fsdp` update weights during backward, and a learning rate that is another one in each step."""
CLIPPED = ["--set", "optimizer.name=sgd", "--set", "optimizer.learning_rate=1", "--set", "train.clip_norm=0.05"]
"""Steps that are the gradients, after clipping."""


def write_small_job(make_images: Callable[..., Path], folder: Path) -> Path:
    """The job and its 21 samples: the last of six batches has one, which one of two ranks has."""
    make_images(classes=3, each=7)
    file = folder / "job.toml"
    file.write_text(SMALL_JOB)
    return file


def weights_of(folder: Path) -> dict[str, Any]:
    """The last checkpoint's weights."""
    last = sorted((folder / "checkpoints").iterdir())[-1]
    state = load_checkpoint(last).state
    weights: dict[str, Any] = state["step"]["model"]
    return weights


def read_by_torch(folder: Path) -> dict[str, Any]:
    """The last checkpoint's weights in parts that ranks have written, as torch.distributed.checkpoint reads them."""
    last = sorted((folder / "checkpoints").iterdir())[-1]
    reader = torch_checkpoint.HuggingFaceStorageReader(str(last))
    sizes: Any = reader.read_metadata().state_dict_metadata
    beginning = "step.model."
    found = {name: torch.zeros(sizes[name].size) for name in sizes if name.startswith(beginning)}
    torch_checkpoint.load(found, storage_reader=reader, no_dist=True)
    return {name.removeprefix(beginning): tensor for name, tensor in found.items()}


def losses(folder: Path) -> list[float]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record]


def events_in(folder: Path) -> Any:
    """What a run wrote for TensorBoard."""
    without_tensorflow()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


@contextmanager
def started(folder: Path, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])}
    child = subprocess.Popen(
        [sys.executable, "-m", "hotloop", "train", "job.toml", *arguments],
        cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with child:
        try:
            yield child
        finally:
            if child.poll() is None:
                child.kill()


def read_until(child: "subprocess.Popen[str]", begin: str) -> None:
    assert child.stderr
    said = []
    for line in child.stderr:
        if line.startswith(begin):
            return
        said.append(line)
    raise AssertionError(f"it ended without a line that begins with {begin!r}:\n{''.join(said)}")


def rank_of(parent: int, rank: int) -> int:
    """The process that is this rank."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if {f"RANK={rank}".encode(), f"HOTLOOP_RANKS_PARENT={parent}".encode()} <= set(variables):
            return int(folder.name)
    raise AssertionError(f"there is no rank {rank}")


def folder_of(rank: int) -> Path:
    """Where this rank and the process that has started it leave each other words."""
    variables = Path(f"/proc/{rank}/environ").read_text().split("\0")
    return Path(next(one.partition("=")[2] for one in variables if one.startswith("HOTLOOP_RANKS_FOLDER=")))


def paced_job(epochs: int, more: str = "") -> str:
    """A job that makes its own data and waits in each step for as long as it is told: task.arguments.seconds.

    Args:
        more: sections that are added.
    """
    return f"""
name = "line"
device = "cpu"
[task]
name = "tiny:Paced"
[data]
train = "made by the task"
batch_size = 4
workers = 0
[model]
name = "made by the task"
[train]
epochs = {epochs}
[checkpoint]
every = "10 steps"
[run]
dir = "runs/line"
{more}"""


MOMENTUM = """[optimizer]
learning_rate = 0.01
arguments = { momentum = 0.9 }
"""
