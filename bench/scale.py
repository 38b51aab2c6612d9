"""What thousands of ranks cost that train one model: plans of division, metadata of checkpoints, agreeing, meeting.

Plans and agreements: nothing is computed and nothing sent. One process is the first of so many ranks (PyTorch's fake
process group), and its model has shapes but no memory (meta device). What the other ranks would send is put in, so that
it has as much to hold and to read as it would have; what a network takes is in no figure.

Meetings are real, of as many ranks as fit here: gloo's connections, and the store in which ranks find each other.

Each figure is of some processes that measure nothing else. Seconds are the processor's, as others may use the machine
meanwhile; `clock_seconds` are the clock's. `python bench/scale.py --json`
"""

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import chain
from typing import Any

import torch
from record import Figure, of_this_source, publish
from scale_costs import Measured, Peak, first_of, processor_seconds
from scale_meetings import connections, joined, store, talking
from scale_messages import SENT, agreement, compared, described_file, gathered
from torch import Tensor

from hotloop.tasks.transformers import build_decoder
from hotloop.train.checkpoint import parts
from hotloop.train.sharded import Types, divide, mesh_of

MODELS = {"8B": ("llama-3-8b", {}), "70B": ("llama-3-8b", {"layers": 80, "width": 8192, "heads": 64, "hidden": 28672})}
RANKS = (1024, 8192)
_VOCABULARY, _CONTEXT = 128_256, 8192
_TIMES = {
    "plans": 3, "agreement": 7, "gathered": 5, "slow_ranks": 5, "connections": 5, "talking": 2, "store": 5,
    "sockets": 1,
}  # fmt: skip
"""Processes, or sets of them, for each figure."""
_INTERRUPTIONS, _DAYS, _GPUS = 419, 54, 16_384
"""Grattafiori et al., "The Llama 3 herd of models", 2024."""


def plans(model_name: str, ranks: int, tensor: int) -> Measured:
    world = first_of(ranks)
    shape, arguments = MODELS[model_name]
    with torch.device("meta"):
        model = build_decoder(shape, _VOCABULARY, _CONTEXT, arguments)
    weights = sum(parameter.numel() for parameter in model.parameters())
    peak, began = Peak(), processor_seconds()
    mesh = mesh_of(replace(world, tensor=tensor), "cpu")
    divide(model, mesh, Types(torch.bfloat16), layers=tensor > 1)
    divided = processor_seconds() - began
    local = sum(parameter.to_local().numel() for parameter in model.parameters())
    parts._identity = id  # tensors without memory all lie at 0
    state = {"model": model.state_dict(), "optimizer": {name: model.state_dict() for name in ("exp_avg", "exp_avg_sq")}}
    began = processor_seconds()
    split = parts.split(state)
    manifest = json.dumps(split.entries)
    planned = processor_seconds() - began
    described = {f"part-{number:05d}-of-{ranks:05d}.safetensors": described_file() for number in range(ranks)}
    return {
        "model": model_name, "weights": weights, "ranks": ranks, "tensor": tensor,
        "divide_seconds": divided, "save_plan_seconds": planned, "memory_bytes": peak.bytes(),
        "local_share": local * ranks / weights, "manifest_bytes": len(manifest) + len(json.dumps(described)),
        "tensors": len(split.entries), **resumed(split.entries, ranks),
    }  # fmt: skip


def resumed(entries: list[dict[str, Any]], ranks: int) -> Measured:
    """A rank of half as many finds its part: how long, and how many files it opens."""
    opened: set[int] = set()

    class Files(parts.PartFiles):
        def read(self, file: int, name: str, slices: Any) -> Tensor:
            opened.add(file)
            return torch.empty([one.stop - one.start for one in slices], device="meta")

    files, half = Files.__new__(Files), ranks // 2
    began = processor_seconds()
    for entry in entries:
        stored, rows = parts.StoredTensor(files, entry), entry["shape"][0]
        each = -(-rows // half)
        first = min((half // 3) * each, rows)
        stored.part((first, *[0] * (len(entry["shape"]) - 1)), (min(each, rows - first), *entry["shape"][1:]))
    return {"load_plan_seconds": processor_seconds() - began, "files_opened": len(opened)}


def useful() -> list[Measured]:
    """The share of time to be expected: 1 − d/τ − (τ/2 + R)/M, with τ = √(2·d·M). Nothing of it is measured."""
    found = []
    for gpus in (*RANKS, _GPUS):
        for stall in (30.0, 0.3):
            between = _DAYS * 86400 * _GPUS / _INTERRUPTIONS / gpus
            interval = math.sqrt(2 * stall * between)
            shares = {
                f"restart in {minutes} min": 1 - stall / interval - (interval / 2 + 60 * minutes) / between
                for minutes in (2, 10)
            }
            given = {"gpus": gpus, "stall_seconds": stall}
            found.append(
                {**given, "between_hours": between / 3600, "interval_minutes": interval / 60, "useful": shares}
            )
    return found


PARTS: dict[str, Callable[..., Measured]] = {
    "plans": plans, "agreement": agreement, "gathered": gathered, "slow_ranks": compared, "connections": connections,
    "talking": talking, "store": store, "sockets": joined,
}  # fmt: skip
CASES: dict[str, list[tuple[Any, ...]]] = {
    "plans": [("8B", 1024, 1), ("8B", 8192, 1), ("70B", 1024, 8), ("70B", 8192, 8)],
    "agreement": [(ranks,) for ranks in (2, *RANKS)],
    "gathered": [(what, ranks) for what in SENT for ranks in RANKS],
    "slow_ranks": [(ranks,) for ranks in RANKS],
    "connections": [(16,), (32,), (64,)],
    "talking": [(ranks,) for ranks in (16, 32, 64, 128, 256)],
    "store": [(ranks, lazily) for lazily in (False, True) for ranks in RANKS],
    "sockets": [(ranks, lazily) for lazily in (False, True) for ranks in (2, 4, 8, 16)],
}


def figures(found: list[Measured]) -> Measured:
    """What processes measured of the same; what differs between them is a figure."""
    units = {"seconds": "s", "memory_bytes": "bytes"}
    content: Measured = {}
    for name, value in found[0].items():
        unit = next((unit for end, unit in units.items() if name.endswith(end) and name != "stall_seconds"), "")
        values = [one[name] for one in found]
        assert unit or values == [value] * len(values), f"{name} is not always the same: {values}"
        values = list(chain(*values)) if isinstance(value, list) else values
        content[name] = asdict(Figure.of(values, unit)) if unit else value
    return content


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--only", choices=list(CASES), help="this part; the others as recorded of the same source")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--record", action="store_true", help="write bench/results/scale.json")
    arguments = parser.parse_args()
    if arguments.part is not None:
        name, *given = json.loads(arguments.part)
        print(json.dumps(PARTS[name](*given)), flush=True)
        os._exit(0)  # groups whose ranks are threads of one process do not take leave of each other
    content: dict[str, Any] = {}
    for name in [arguments.only] if arguments.only else CASES:
        content[name] = []
        for case in CASES[name]:
            command = [sys.executable, __file__, "--part", json.dumps([name, *case])]
            found = []
            for _ in range(_TIMES[name]):
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=1800, check=True)
                found.append(json.loads(done.stdout.splitlines()[-1]))
            content[name].append(figures(found))
            print(name, content[name][-1], file=sys.stderr, flush=True)
    if arguments.record:
        if arguments.only:
            known = of_this_source("scale")
            content = {**{name: known[name] for name in CASES}, **content}
        publish("scale", {**content, "useful": useful()}, arguments.json)
    else:
        print(json.dumps(content))


if __name__ == "__main__":
    main()
