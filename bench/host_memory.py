"""What a model whose weights are divided takes of the host's memory at the start, and how long the start takes.

Llama 3's 8B shapes (32 GB of weights) on all GPUs of one host (FSDP2). The rival is the same model as one of a user's
own, of which hotloop does not know whether it can be made without numbers: each rank makes all of it. Memory is what
all ranks hold beside files, at its highest until the first step; what they hold with two layers is not counted.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch
from record import Figure, add_device, publish, record_so_far
from torch import nn
from training import Records, of_event, processes_with, train_until

from hotloop.tasks.transformers import build_decoder

_FEW = 2
_MOST_SECONDS = 200.0
_NAME = "llama-3-8b"
_MARK = "HOTLOOP_BENCH"


class Sizes:
    """What is made: large on GPUs, tiny without."""

    def __init__(self, device: str, layers: int) -> None:
        tiny = device == "cpu"
        self.device, self.layers = device, layers
        self.ranks = 2 if tiny else torch.cuda.device_count()
        self.context, self.vocabulary = 128, 64 if tiny else 128_256
        self.arguments = {"width": 64, "heads": 2, "kv_heads": 2, "hidden": 64} if tiny else {}

    @property
    def weights(self) -> int:
        """Bytes of them, but for those of `_FEW` layers."""
        with torch.device("meta"):
            whole, few = (self.model(layers) for layers in (self.layers, _FEW))
        return sum(one.nbytes for one in whole.parameters()) - sum(one.nbytes for one in few.parameters())

    def model(self, layers: int) -> nn.Module:
        return build_decoder(_NAME, self.vocabulary, self.context, {**self.arguments, "layers": layers})


def own(vocabulary: int, context: int, **arguments: int) -> nn.Module:
    """The model of a job, as one of a user's own."""
    return build_decoder(_NAME, vocabulary, context, arguments)


def started(sizes: Sizes, folder: Path, count: int, by_each: bool) -> tuple[float, float]:
    """The most bytes that ranks held until their first step, and its seconds since the start."""
    run = Path(tempfile.mkdtemp(dir=folder))
    job = {
        "device": sizes.device,
        "parallel": "fsdp",
        "task": {"name": "tokens", "context": sizes.context, "vocabulary": sizes.vocabulary},
        "data": {"train": str(folder / "tokens.npy"), "batch_size": sizes.ranks},
        "model": {
            "name": "host_memory:own" if by_each else _NAME,
            "arguments": {**sizes.arguments, "layers": count},
        },
        "optimizer": {"name": "sgd", "learning_rate": 1e-4},
        "speed": {"compile": False, "activations": "keep"},
        "ranks": {"processes": sizes.ranks, "restarts": 0},
        "train": {"epochs": 1},
        "checkpoint": {"every": "2 epochs", "background": False},
        "log": {"every": 1, "tensorboard": False},
        "run": {"dir": str(run / "run")},
    }
    file = run / "job.toml"
    file.write_text(tomli_w.dumps(job))
    held: list[float] = []

    def begun(records: Records) -> bool:
        held.append(_held())
        return bool(of_event(records, "step"))

    since = time.time()
    steps = of_event(train_until(file, run / "run" / "metrics.jsonl", begun, _MOST_SECONDS), "step")
    if not steps:
        sys.exit(f"no step within {_MOST_SECONDS:.0f} s")
    return max(held), steps[0]["time"] - since


def _held() -> float:
    """Bytes that this bench's trainings hold beside files."""
    total = 0
    for process in processes_with(f"{_MARK}={os.getpid()}"):
        with suppress(OSError):
            lines = (process / "status").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem")))
    return 1024.0 * total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_device(parser)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=32, help="of 32")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    sizes = Sizes(arguments.device, arguments.layers)
    os.environ |= {
        _MARK: str(os.getpid()),
        "PYTHONPATH": f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}",
    }
    found: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        np.save(folder / "tokens.npy", np.zeros(64 * sizes.context + 1, np.uint32))
        few, _ = started(sizes, folder, _FEW, by_each=False)
        for _ in range(arguments.rounds):
            for who, by_each in (("made by one", False), ("made by each", True)):
                held, seconds = started(sizes, folder, sizes.layers, by_each)
                figures = found.setdefault(who, {"memory": [], "first step": []})
                figures["memory"].append((held - few) / sizes.weights)
                figures["first step"].append(seconds)
                print(who, figures, file=sys.stderr, flush=True)
                record_so_far("host_memory", content(sizes, few, found), sizes.device)
    if sizes.device == "cuda":
        publish("host_memory", content(sizes, few, found), arguments.json)
    else:
        print(json.dumps(content(sizes, few, found)))


def content(sizes: Sizes, few: float, found: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    units = {"memory": "of the weights", "first step": "s"}
    return {
        "ranks": sizes.ranks,
        "weights_bytes": sizes.weights,
        "bytes_with_two_layers": few,
        **{
            who: {name: vars(Figure.of(values, units[name])) for name, values in figures.items()}
            for who, figures in found.items()
        },
    }


if __name__ == "__main__":
    main()
