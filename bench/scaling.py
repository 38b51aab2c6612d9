"""ResNet-50 on all GPUs of one host against one of them: `hotloop train`, and DistributedDataParallel by hand.

224 pixels, bf16, batches of 256 on each GPU. Data lies on the GPUs, or comes from JPEG files (photographs of 500 × 375
pixels, 110 to 140 KiB), with other programs on a quarter of the processors too. Gradients travel as float32 and, in
runs of their own, as bfloat16, or by DDP's buckets in a static graph. Each figure is an epoch of a run, of 24 steps
with any number of GPUs, after those in which all is compiled and tried. Cards of one host differ, and several go at
the pace of the slowest: what one does is measured on each of them, side by side, each with its share of the processors.
The rival compiles what DDP wraps (static graph, bucket views), on random batches that stay on the GPU.

Goals: 0.975 of so many times one GPU's speed; from JPEG files 0.95 of the speed with data on the GPUs.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import tomli_w
import torch
from contenders import Image, hand_written, measure
from neighbours import neighbours
from photographs import make_photographs
from places import Place, places
from record import Figure, add_device, of_ranks, publish, record_so_far
from step import resnet
from torch import distributed, multiprocessing
from torch.nn.parallel import DistributedDataParallel

_WARM_STEPS = 60
"""hotloop tries two ways of averaging gradients in the first 30."""
_SCALE, _RATIO = [0.08, 1.0], [3 / 4, 4 / 3]


Epochs = dict[str, list[float]]
"""Images/s of each epoch, of each contender."""


class Sizes:
    """What is trained: large on GPUs, tiny without.

    Attributes:
        ranks: GPUs, or processes.
        batch: on each of them.
        steps: of an epoch, as many with any number of GPUs: what begins and ends an epoch weighs the same.
        rounds: runs of each, if nobody asks for more or fewer.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        tiny = device == "cpu"
        self.ranks = 2 if tiny else torch.cuda.device_count()
        self.network, self.classes = ("resnet18", 10) if tiny else ("resnet50", 1000)
        self.pixels, self.batch = (32, 8) if tiny else (224, 256)
        self.steps, self.steps_by_hand = (2, 4) if tiny else (24, 100)
        self.warm_epochs, self.epochs = (1, 3) if tiny else (-(-_WARM_STEPS // self.steps), 8)
        self.rounds = 1 if tiny else 3

    def images(self, ranks: int) -> int:
        return ranks * self.batch * self.steps


def write_arrays(file: Path, sizes: Sizes, ranks: int) -> Path:
    random = np.random.default_rng(0)
    shape = (sizes.images(ranks), sizes.pixels, sizes.pixels, 3)
    pixels = np.frombuffer(random.bytes(int(np.prod(shape))), np.uint8).reshape(shape)
    np.savez(file, images=pixels, labels=random.integers(0, sizes.classes, len(pixels)))
    return file


_ALONE, _DISTURBED = "1, card ", "JPEG files, a quarter of the processors taken"
_USUAL: Mapping[str, Any] = MappingProxyType({})
_WAYS = {"gradients as bfloat16": {"gradients": "bf16"}, "static graph": {"static_graph": True}}
"""Of averaging gradients, beside the usual one."""


def alone(sizes: Sizes, data: Path, folder: Path) -> Epochs:
    """Each card by itself."""

    def on(place: Place) -> list[float]:
        place.take()
        return trained(sizes, data, 1, Path(tempfile.mkdtemp(dir=folder)), environment=place.environment)

    parts = places(sizes.ranks if sizes.device == "cuda" else 0)
    with ThreadPoolExecutor(len(parts)) as pool:
        return {_ALONE + ",".join(place.gpus): found for place, found in zip(parts, pool.map(on, parts), strict=True)}


def trained(
    sizes: Sizes, data: Path, ranks: int, folder: Path,
    way: Mapping[str, Any] = _USUAL, environment: Mapping[str, str] = os.environ,
) -> list[float]:  # fmt: skip
    """Images/s of each epoch of `hotloop train` once it is warm."""
    batch = sizes.batch * ranks
    epochs = sizes.warm_epochs + sizes.epochs
    run = folder / f"run-{len(list(folder.iterdir()))}"
    augment: dict[str, Any] = {"flip": 0.5, "crop_scale": _SCALE, "crop_ratio": _RATIO}
    if data.suffix == ".npz":
        augment["crop_scale"] = [1.0, 1.0]
    job = {
        "device": sizes.device,
        "task": {"image_size": sizes.pixels, "augment": augment},
        "data": {"train": str(data), "batch_size": batch, "last_batch": "drop"},
        "model": {"name": sizes.network, "arguments": {"num_classes": sizes.classes}},
        "train": {"epochs": epochs},
        "optimizer": {"name": "sgd", "learning_rate": 0.01},
        "speed": {"compile": sizes.device == "cuda"},
        "ranks": {"processes": ranks, "restarts": 0, **way},
        "checkpoint": {"every": f"{epochs} epochs"},
        "run": {"dir": str(run)},
    }
    file = folder / "job.toml"
    file.write_text(tomli_w.dumps(job))
    command = [sys.executable, "-m", "hotloop", "train", str(file)]
    done = subprocess.run(command, timeout=400, capture_output=True, text=True, env=dict(environment))
    if done.returncode:
        sys.exit(f"{ranks} ranks ended with {done.returncode}:\n{done.stderr[-4000:]}")
    for line in done.stderr.splitlines():
        if "warning" in line:
            print(line, file=sys.stderr)
    result = json.loads((run / "result.json").read_text())
    if result["data_slow"]:
        told = ", ".join(str(result[key]) for key in ("decode", "data_slow", "data_advice"))
        print(f"{ranks}, {data.name}: data holds it up: {told}", file=sys.stderr, flush=True)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record["samples_per_second"] for record in records if record["event"] == "epoch"][sizes.warm_epochs :]


def rank_main(rank: int, ranks: int, sizes: Sizes, rounds: int, folder: str) -> None:
    """The loop by hand, on so many GPUs."""
    cuda = sizes.device == "cuda"
    torch.backends.cudnn.benchmark = True
    if cuda:
        torch.cuda.set_device(rank)
    store = f"file://{folder}/store-{ranks}"
    distributed.init_process_group("nccl" if cuda else "gloo", init_method=store, rank=rank, world_size=ranks)
    spread = partial(
        DistributedDataParallel, device_ids=[rank] if cuda else None, static_graph=True, gradient_as_bucket_view=True
    )
    image = Image(sizes.batch, sizes.pixels, sizes.classes)
    make, mode = resnet(sizes.network, sizes.classes), "default" if cuda else None
    contender = partial(hand_written, make, image, sizes.device, torch.bfloat16, True, mode, cuda, spread)
    measured = measure({"by hand": contender}, sizes.device, rounds, sizes.steps_by_hand)["by hand"]
    if rank == 0:
        speeds = [sizes.batch * ranks * rate for rate in measured.rates]
        (Path(folder) / f"by-hand-{ranks}.json").write_text(json.dumps(speeds))
    distributed.barrier()
    distributed.destroy_process_group()


def by_hand(sizes: Sizes, ranks: int, rounds: int, folder: Path) -> list[float]:
    multiprocessing.spawn(rank_main, (ranks, sizes, rounds, str(folder)), nprocs=ranks)
    speeds: list[float] = json.loads((folder / f"by-hand-{ranks}.json").read_text())
    return speeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, help="runs of each, whose epochs are the figures: 3 on GPUs")
    parser.add_argument("--photographs", type=Path, help="a folder of them; made if it is empty or not there")
    parser.add_argument("--without", nargs="*", default=[], choices=["jpeg", "ways", "by hand"])
    add_device(parser)
    arguments = parser.parse_args()
    sizes = Sizes(arguments.device)
    rounds = arguments.rounds or sizes.rounds
    speeds: Epochs = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def together(data: Path, contender: str, way: Mapping[str, Any] = _USUAL) -> Epochs:
            return {contender: trained(sizes, data, sizes.ranks, folder, way)}

        def disturbed(data: Path) -> Epochs:
            with neighbours():
                return together(data, _DISTURBED)

        one, several = (write_arrays(folder / f"images-{ranks}.npz", sizes, ranks) for ranks in (1, sizes.ranks))
        contenders: list[Callable[[], Epochs]] = [
            partial(alone, sizes, one, folder),
            partial(together, several, str(sizes.ranks)),
        ]
        if "ways" not in arguments.without:
            contenders += [partial(together, several, f"{sizes.ranks}, {name}", way) for name, way in _WAYS.items()]
        if "jpeg" not in arguments.without:
            photographs = arguments.photographs or folder / "photographs"
            if not photographs.exists() or not os.listdir(photographs):
                make_photographs(photographs, sizes.images(sizes.ranks))
            contenders += [partial(together, photographs, "JPEG files"), partial(disturbed, photographs)]
        for number in range(rounds):
            for figures in contenders:
                for contender, found in figures().items():
                    speeds.setdefault(contender, []).extend(found)
                    print(f"round {number + 1}, {contender}: {[round(speed) for speed in found]}", file=sys.stderr)
                    record_so_far(of_ranks("scaling", sizes.ranks), content(sizes, speeds), sizes.device)
        if "by hand" not in arguments.without:
            for ranks in (1, sizes.ranks):
                speeds[f"{ranks}, by hand"] = by_hand(sizes, ranks, 3 * rounds, folder)
                record_so_far(of_ranks("scaling", sizes.ranks), content(sizes, speeds), sizes.device)
    publish_or_print(content(sizes, speeds), arguments)


def content(sizes: Sizes, speeds: Epochs) -> dict[str, Any]:
    """Figures and ratios of what has been timed so far."""
    alone = [found for name, found in speeds.items() if name.startswith(_ALONE)]
    slowest = min(alone, key=np.median, default=[])
    ones = [("1", [speed for found in alone for speed in found]), ("1, slowest card", slowest)]
    figures = {name: Figure.of(values, "images/s") for name, values in [*ones, *speeds.items()]}
    several = str(sizes.ranks)
    pairs = {
        "hotloop": (several, "1", sizes.ranks),
        "hotloop, slowest card": (several, "1, slowest card", sizes.ranks),
        **{f"hotloop, {name}": (f"{several}, {name}", "1", sizes.ranks) for name in _WAYS},
        "by hand": (f"{several}, by hand", "1, by hand", sizes.ranks),
        "hotloop against by hand": (several, f"{several}, by hand", 1),
        "JPEG files": ("JPEG files", several, 1),
        _DISTURBED: (_DISTURBED, several, 1),
    }
    return {
        "ranks": sizes.ranks,
        "goals": {"hotloop": 0.975, "JPEG files": 0.95},
        "images_per_second": {name: vars(figure) for name, figure in figures.items()},
        "epochs": speeds,
        "scaling": {
            name: figures[these].median / figures[those].median / times
            for name, (these, those, times) in pairs.items()
            if these in figures and those in figures
        },
    }


def publish_or_print(found: dict[str, Any], arguments: argparse.Namespace) -> None:
    if arguments.device == "cuda":
        publish(of_ranks("scaling", found["ranks"]), found, arguments.json)
    else:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
