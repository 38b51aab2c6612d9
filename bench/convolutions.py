"""ResNet-50 in process after process: what the search for cuDNN's algorithms has found in each, PyTorch's way and ours.

224 pixels, bf16, batches of 256 on the GPU. Processes of the two ways take turns, each way with a cache of its own for
what is compiled. Ranks of one training search each for themselves and go at the pace of the slowest, so what counts is
the slowest of them over the mean, too.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from contenders import Image, hotloop_step, measure
from record import Figure, add_device, publish, record_so_far
from step import resnet

from hotloop.kernels import convolution

_OURS, _TORCHS = "ours", "PyTorch's"


def one(way: str, device: str) -> dict[str, Any]:
    """In a process of its own: images/s of each round, seconds of the first step."""
    warnings.filterwarnings("ignore")
    torch.backends.cudnn.benchmark = True
    if way == _TORCHS:
        convolution._is_searched = lambda x, weight: False
    tiny = device == "cpu"
    image = Image(4, 32, 10) if tiny else Image(256, 224, 1000)
    make = resnet("resnet18" if tiny else "resnet50", image.classes)
    step = {way: lambda: hotloop_step(make, image, device, told=lambda line: print(line, file=sys.stderr))}
    found = measure(step, device, rounds=2 if tiny else 5, steps=2 if tiny else 40)[way]
    rates = [rate * image.batch for rate in found.rates]
    return {"rates": rates, "first_seconds": found.first_seconds, "peak_bytes": found.peak_bytes}


def run(way: str, device: str, cache: Path) -> dict[str, Any]:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}
    command = [sys.executable, __file__, "--one", way, "--device", device]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        sys.exit(f"{way} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"{way}: {[round(rate) for rate in found['rates']]}", file=sys.stderr, flush=True)
    return found


def told(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the processes of one way; the first has compiled for the others."""
    rates = [statistics.median(process["rates"]) for process in found]
    return {
        "images_per_second": vars(Figure.of(rates, "1/s")),
        "slowest_over_mean": min(rates) / statistics.mean(rates),
        "spread_within_processes": max(max(process["rates"]) / min(process["rates"]) - 1 for process in found),
        "first_step_seconds": vars(Figure.of([process["first_seconds"] for process in found[1:]], "s")),
        "peak_gib": max(process["peak_bytes"] for process in found) / 2**30,
    }


def compared(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    content = {way: told(processes) for way, processes in found.items()}
    medians = [content[way]["images_per_second"]["median"] for way in (_OURS, _TORCHS)]
    return {**content, "ratio": medians[0] / medians[1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=6, help="of each way; two at the least")
    parser.add_argument("--one", choices=[_OURS, _TORCHS], help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    add_device(parser)
    arguments = parser.parse_args()
    if arguments.processes < 2:
        parser.error("--processes: two at the least")
    if arguments.one:
        print(json.dumps(one(arguments.one, arguments.device)))
        return
    found: dict[str, list[dict[str, Any]]] = {_TORCHS: [], _OURS: []}
    with tempfile.TemporaryDirectory() as cache:
        for _ in range(arguments.processes):
            for number, (way, processes) in enumerate(found.items()):
                processes.append(run(way, arguments.device, Path(cache) / str(number)))
            if len(found[_OURS]) > 1:
                content = compared(found)
                record_so_far("convolutions", content, arguments.device)
    if arguments.device == "cuda":
        publish("convolutions", content, arguments.json)
    else:
        print(json.dumps(content))


if __name__ == "__main__":
    main()
