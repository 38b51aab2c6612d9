"""A step on several GPUs of one host: `DistributedDataParallel` by hand against hotloop over it.

Two models: three small layers, whose time is the host's, and ResNet-50 in batches of 128, whose time is the GPU's. The
rival is the loop of the guides in bf16, as it stands and compiled. No goal is set; it must not be slower.
"""

import argparse
import json
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from contenders import Image, Train, figures, hand_written, hotloop_step, measure, ratios
from record import add_device, publish
from step import resnet
from torch import distributed, multiprocessing, nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

_BEFORE = 45
"""Steps before any is timed: hotloop tries two ways of averaging gradients in the first 30."""


def layers() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(3072, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )


def warm(train: Train) -> Train:
    for _ in range(_BEFORE):
        train()
    return train


def rank_main(rank: int, size: int, folder: str, device: str, rounds: int) -> None:
    warnings.filterwarnings("ignore")
    torch.backends.cudnn.benchmark = True
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    distributed.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=size)
    spread = partial(DistributedDataParallel, device_ids=[rank] if device == "cuda" else None)
    tiny = device == "cpu"
    cases = {
        "layers": (layers, Image(64, 32, 10)),
        "resnet50": (resnet("resnet50", 1000), Image(128, 224, 1000)),
    }
    if tiny:
        cases["resnet50"] = (resnet("resnet18", 10), Image(4, 32, 10))
    content: dict[str, Any] = {}
    for name, (make, image) in cases.items():
        torch.compiler.reset()  # what the rival of the case before compiled is not ours
        counters.clear()
        told: list[str] = []

        def by_hand(mode: str | None, make: Any = make, image: Image = image) -> Train:
            return warm(hand_written(make, image, device, torch.bfloat16, True, mode, not tiny, spread))

        def ours(make: Any = make, image: Image = image, told: list[str] = told) -> Train:
            return warm(hotloop_step(make, image, device, spread=spread, told=told.append))

        contenders = {"hotloop": ours, "DDP": partial(by_hand, None)}
        if not tiny:
            contenders["DDP, compiled"] = partial(by_hand, "default")
        measured = measure(contenders, device, rounds, steps=2 if tiny else 30)
        content[name] = {"figures": figures(measured, size * image.batch), "ratios": ratios(measured, "hotloop"),
                         "told": told}  # fmt: skip
        print(f"rank {rank}, {name}: {content[name]['ratios']} {told}", file=sys.stderr, flush=True)
    if rank == 0:
        (Path(folder) / "content.json").write_text(json.dumps(content))
    distributed.barrier()
    distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    add_device(parser)
    arguments = parser.parse_args()
    size = torch.cuda.device_count() if arguments.device == "cuda" else 2
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(rank_main, (size, folder, arguments.device, arguments.rounds), nprocs=size)
        content = json.loads((Path(folder) / "content.json").read_text())
    content["ranks"] = size
    if arguments.device == "cuda":
        publish("two_cards", content, arguments.json)
    else:
        print(json.dumps(content))


if __name__ == "__main__":
    main()
