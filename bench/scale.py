"""What thousands of ranks cost that train one model: plans of division, metadata of checkpoints, resuming elsewhere.

Nothing is computed and nothing sent: one process is the first of so many ranks (PyTorch's fake process group), and its
model has shapes but no memory (meta device). `python bench/scale.py --json`
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import Any

import torch
from record import publish
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from hotloop.tasks.transformers import build_decoder
from hotloop.train.checkpoint import parts
from hotloop.train.sharded import Types, divide, mesh_of
from hotloop.train.world import World

MODELS = {"8B": ("llama-3-8b", {}), "70B": ("llama-3-8b", {"layers": 80, "width": 8192, "heads": 64, "hidden": 28672})}
CASES = [("8B", 1024, 1), ("8B", 8192, 1), ("70B", 1024, 8), ("70B", 8192, 8)]
_VOCABULARY, _CONTEXT = 128_256, 8192


def measure(model_name: str, ranks: int, tensor: int) -> dict[str, Any]:
    """One case, in a process of its own."""
    distributed.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    shape, arguments = MODELS[model_name]
    with torch.device("meta"):
        model = build_decoder(shape, _VOCABULARY, _CONTEXT, arguments)
    weights = sum(parameter.numel() for parameter in model.parameters())
    before = resident()
    seconds = {}

    def timed(what: str, began: float) -> None:
        seconds[what] = time.perf_counter() - began

    began = time.perf_counter()
    mesh = mesh_of(World(size=ranks, tensor=tensor), "cpu")
    divide(model, mesh, Types(torch.bfloat16), layers=tensor > 1)
    timed("divide_seconds", began)
    local = sum(parameter.to_local().numel() for parameter in model.parameters())
    parts._identity = id  # tensors without memory all lie at 0
    state = {"model": model.state_dict(), "optimizer": {name: model.state_dict() for name in ("exp_avg", "exp_avg_sq")}}
    began = time.perf_counter()
    split = parts.split(state)
    manifest = json.dumps(split.entries)
    timed("save_plan_seconds", began)
    described = {
        f"part-{number:05d}-of-{ranks:05d}.safetensors": {"sha256": "0" * 64, "bytes": 1} for number in range(ranks)
    }
    return {
        "model": model_name, "weights": weights, "ranks": ranks, "tensor": tensor, **seconds,
        "memory_bytes": resident() - before, "local_share": local * ranks / weights,
        "manifest_bytes": len(manifest) + len(json.dumps(described)), "tensors": len(split.entries),
        **resumed(split.entries, ranks),
    }  # fmt: skip


def resumed(entries: list[dict[str, Any]], ranks: int) -> dict[str, Any]:
    """A rank of half as many finds its part: how long, and how many files it opens."""
    opened: set[int] = set()

    class Files(parts.PartFiles):
        def read(self, file: int, name: str, slices: Any) -> torch.Tensor:
            opened.add(file)
            return torch.empty([one.stop - one.start for one in slices], device="meta")

    files, half = Files.__new__(Files), ranks // 2
    began = time.perf_counter()
    for entry in entries:
        stored, rows = parts.StoredTensor(files, entry), entry["shape"][0]
        each = -(-rows // half)
        first = min((half // 3) * each, rows)
        stored.part((first, *[0] * (len(entry["shape"]) - 1)), (min(each, rows - first), *entry["shape"][1:]))
    return {"load_plan_seconds": time.perf_counter() - began, "files_opened": len(opened)}


def resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--record", action="store_true", help="write bench/results/scale.json")
    arguments = parser.parse_args()
    if arguments.case is not None:
        print(json.dumps(measure(*CASES[arguments.case])))
        return
    found = []
    for number in range(len(CASES)):
        command = [sys.executable, __file__, "--case", str(number)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
        print(found[-1], file=sys.stderr, flush=True)
    if arguments.record:
        publish("scale", {"cases": found}, arguments.json)
    else:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
