"""The training step of image networks on one GPU against what people write by hand, and against the defaults.

Sections, each with its goals:
- resnet50: 224 pixels, batch 256, a batch that lies on the GPU. At least 1.03 × a hand-written bf16 channels_last
  compiled loop, 3.1 × PyTorch's defaults, 2.3 × the guides' fp16 autocast loop.
- resnet152: batch 128. At least 2.3 × the defaults, with at most 0.45 of their memory.
- cifar: ResNet-50 on 50,000 images of 32 × 32 in host memory, whole epochs of `hotloop train` with augmentation,
  shuffling and logging. At least 1.4 × a careful loop of the same work, images on the GPU, compiled in
  "reduce-overhead" mode. At most 0.42 s an epoch with batches of 512, 0.31 s with 1024.
- small: a small network of the CIFAR speed runs' kind. At least 0.95 × a hand-captured graph of the same work.
- second_start: the first step of a compiled job, with a cold and a warm cache. At most 0.25 of the cold one.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from contenders import Image, captured, figures, hand_written, hotloop_step, measure, ratios, synchronize
from record import Figure, add_device, record
from torch import Tensor, nn
from torch.nn import functional

import hotloop
from hotloop.core.job_file import parse_job
from hotloop.tasks.augment import Crops
from hotloop.train.observer import Observer, Warned


def resnet(name: str, classes: int) -> Callable[[], nn.Module]:
    from torchvision import models

    def make() -> nn.Module:
        network: nn.Module = getattr(models, name)(num_classes=classes)
        return network

    return make


def resnet50(device: str, rounds: int) -> dict[str, Any]:
    tiny = device == "cpu"
    image = Image(4, 32, 10) if tiny else Image(256, 224, 1000)
    make = resnet("resnet18" if tiny else "resnet50", image.classes)
    mode = None if tiny else "default"
    measured = measure(
        {
            "hotloop": lambda: hotloop_step(make, image, device),
            "hotloop, without its kernels": lambda: hotloop_step(make, image, device, own_kernels=False),
            "compiled": lambda: hand_written(make, image, device, torch.bfloat16, True, mode, True),
            "fp16 guide": lambda: hand_written(make, image, device, torch.float16, False, None, False),
            "defaults": lambda: hand_written(make, image, device, None, False, None, False),
        },
        device,
        rounds,
        steps=2 if tiny else 20,
    )
    goals = {"compiled": 1.03, "defaults": 3.1, "fp16 guide": 2.3}
    return {"figures": figures(measured, image.batch), "ratios": ratios(measured, "hotloop"), "goals": goals}


def resnet152(device: str, rounds: int) -> dict[str, Any]:
    tiny = device == "cpu"
    image = Image(4, 32, 10) if tiny else Image(128, 224, 1000)
    make = resnet("resnet18" if tiny else "resnet152", image.classes)
    measured = measure(
        {
            "hotloop": lambda: hotloop_step(make, image, device),
            "defaults": lambda: hand_written(make, image, device, None, False, None, False),
        },
        device,
        rounds,
        steps=2 if tiny else 15,
    )
    memory = measured["hotloop"].peak_bytes / max(1, measured["defaults"].peak_bytes)
    return {
        "figures": figures(measured, image.batch),
        "ratios": ratios(measured, "hotloop"),
        "memory_ratio": memory,
        "goals": {"defaults": 2.3, "memory_ratio": 0.45},
    }


def train_arrays(
    folder: Path, images: int, batch: int, epochs: int, device: str, **keys: Any
) -> tuple[list[float], Any]:
    """Seconds an epoch of `hotloop train` over random images, without the first two epochs; and the run's result."""
    file = folder / f"images-{images}.npz"
    if not file.exists():
        random = np.random.default_rng(0)
        pixels = random.integers(0, 256, (images, 32, 32, 3), dtype=np.uint8)
        np.savez(file, images=pixels, labels=random.integers(0, 10, images))
    raw = {
        "task": {"image_size": 32, "augment": {"crop_scale": [1.0, 1.0], "shift": 4, "flip": 0.5}},
        "data": {"train": str(file), "batch_size": batch, "last_batch": "drop"},
        "train": {"epochs": epochs},
        "optimizer": {"learning_rate": 0.01, "arguments": {"momentum": 0.9}},
        "speed": {"compile": device == "cuda"},
        "device": device,
        "run": {"dir": str(folder / f"run-{time.monotonic_ns()}")},
        **keys,
    }
    run, result = hotloop.train_job(parse_job(raw, "bench"), hotloop.read_machine(), Said())
    records = [record for record in run.metrics() if record["event"] == "epoch"]
    return [images / record["samples_per_second"] for record in records[2:]], result


class Said(Observer):
    """Shows what the step could not do."""

    def on(self, event: object) -> None:
        if isinstance(event, Warned):
            print(event.text, file=sys.stderr)


def cifar(device: str, rounds: int) -> dict[str, Any]:
    tiny = device == "cpu"
    images, batches, name = (64, (16, 32), "resnet18") if tiny else (50_000, (512, 1024), "resnet50")
    content: dict[str, Any] = {"epoch_seconds": {}, "ratios": {}}
    content["goals"] = {"reduce-overhead": 1.4}
    content["goals"]["epoch_seconds"] = {"512": 0.42, "1024": 0.31}
    with tempfile.TemporaryDirectory() as folder:
        for batch in batches:
            seconds, result = train_arrays(Path(folder), images, batch, rounds + 2, device, model={"name": name})
            figure = Figure.of(seconds, "s")
            content["epoch_seconds"][str(batch)] = {**vars(figure), "captured": result.captured}
            print(f"hotloop, {batch}: {figure.median:.3f} s", file=sys.stderr, flush=True)
            theirs = Figure.of(epochs_by_hand(resnet(name, 10), images, batch, device, rounds), "s")
            content["epoch_seconds"][f"{batch}, reduce-overhead"] = vars(theirs)
            content["ratios"][str(batch)] = theirs.median / figure.median
    return content


def epochs_by_hand(make: Callable[[], nn.Module], images: int, batch: int, device: str, rounds: int) -> list[float]:
    """Seconds an epoch of a careful loop: images on the device, gathered, augmented, normalised there, then trained on.

    bf16, channels_last, fused SGD, torch.compile in "reduce-overhead" mode; no logging.
    """
    torch.compiler.reset()
    model = make().to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    network = torch.compile(model, mode="reduce-overhead") if device == "cuda" else model
    pixels = torch.randint(0, 256, (images, 3, 32, 32), dtype=torch.uint8, device=device)
    labels = torch.randint(0, 10, (images,), device=device)
    crops = Crops(flip=0.5, shift=4)

    def epoch() -> None:
        order = torch.randperm(images, device=device)
        for start in range(0, images - batch + 1, batch):
            chosen = order[start : start + batch]
            inputs = crops.cut(pixels[chosen].float(), torch.rand(batch, 5, device=device), 32)
            inputs = ((inputs - 127) / 60).contiguous(memory_format=torch.channels_last)
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = functional.cross_entropy(network(inputs), labels[chosen])
            loss.backward()
            optimizer.step()
        synchronize(device)

    seconds = []
    # From its cache torch 2.11 takes code for other strides when it compiles the same network a second time (where a
    # feature map is one pixel), and fails: the rival must run.
    with torch._inductor.config.patch(fx_graph_cache=False):
        for number in range(rounds + 2):
            started = time.perf_counter()
            epoch()
            if number >= 2:
                seconds.append((time.perf_counter() - started) * images / (images // batch * batch))
    return seconds


def small_network(num_classes: int = 10) -> nn.Module:
    """A narrow, fast network for 32 × 32 images: 2 × 2 whitening-like stem, three blocks of two convolutions."""

    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.MaxPool2d(2), nn.BatchNorm2d(outputs), nn.GELU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.GELU(),
        ]  # fmt: skip

    layers = [nn.Conv2d(3, 24, 2), nn.GELU(), *block(24, 64), *block(64, 256), *block(256, 256), nn.MaxPool2d(3)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, num_classes))


def captured_by_hand(images: int, batch: int) -> Callable[[], None]:
    """An epoch of the small network: gather, augment and step in one graph, written by hand."""
    model = small_network().cuda().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    network = torch.compile(model, dynamic=False)
    pixels = torch.randint(0, 256, (images, 32, 32, 3), dtype=torch.uint8, device="cuda")
    labels = torch.randint(0, 10, (images,), device="cuda")
    random = torch.rand(images, 5, device="cuda")
    chosen = torch.arange(batch, device="cuda")
    crops = Crops(flip=0.5, shift=4)
    mean, scale = torch.full((3, 1, 1), 127.0, device="cuda"), torch.full((3, 1, 1), 1 / 60, device="cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        inputs = crops.cut(pixels[chosen].permute(0, 3, 1, 2).float(), random[chosen], 32)
        inputs = ((inputs - mean) * scale).contiguous(memory_format=torch.channels_last)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = functional.cross_entropy(network(inputs), labels[chosen])
        loss.backward()
        optimizer.step()

    graph = captured(step, 4)
    kept = step  # and all that it uses: the graph knows addresses only

    def epoch() -> None:
        assert kept
        order: Tensor = torch.randperm(images, device="cuda")
        for start in range(0, images - batch + 1, batch):
            chosen.copy_(order[start : start + batch])
            graph.replay()
        torch.cuda.synchronize()

    return epoch


def small(device: str, rounds: int) -> dict[str, Any]:
    tiny = device == "cpu"
    images, batch = (256, 64) if tiny else (50_000, 1024)
    with tempfile.TemporaryDirectory() as folder:
        model = {"name": "step:small_network"}
        seconds, result = train_arrays(Path(folder), images, batch, 2 * rounds + 2, device, model=model)
    content = {"hotloop": {**vars(Figure.of(seconds, "s")), "captured": result.captured}, "goals": {"by hand": 0.95}}
    if not tiny:
        epoch = captured_by_hand(images, batch)
        epoch()
        theirs = []
        for _ in range(2 * rounds):
            started = time.perf_counter()
            epoch()
            theirs.append((time.perf_counter() - started) * images / (images // batch * batch))
        content["by hand"] = vars(Figure.of(theirs, "s"))
        content["ratios"] = {"by hand": content["by hand"]["median"] / content["hotloop"]["median"]}
    return content


_FIRST_STEP = """
import sys, time
sys.path.insert(0, sys.argv[1])
from contenders import Image, hotloop_step, synchronize
from step import resnet
device = sys.argv[2]
image = Image(256, 224, 1000) if device == "cuda" else Image(4, 32, 10)
train = hotloop_step(resnet("resnet50" if device == "cuda" else "resnet18", image.classes), image, device)
synchronize(device)
started = time.perf_counter()
train()
synchronize(device)
print(time.perf_counter() - started)
"""


def second_start(device: str, rounds: int) -> dict[str, Any]:
    """Seconds to the end of the first step, in a process of its own."""
    seconds: dict[str, list[float]] = {"cold": [], "warm": []}
    for _ in range(max(1, rounds // 2)):
        with tempfile.TemporaryDirectory() as cache:
            for name in ("cold", "warm"):
                command = [sys.executable, "-c", _FIRST_STEP, str(Path(__file__).parent), device]
                environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": cache + "/triton"}
                done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=True)
                seconds[name].append(float(done.stdout.split()[-1]))
    figures = {name: Figure.of(values, "s") for name, values in seconds.items()}
    return {
        "first_step_seconds": {name: vars(figure) for name, figure in figures.items()},
        "ratio": figures["warm"].median / figures["cold"].median,
        "goals": {"ratio": 0.25},
    }


SECTIONS = {
    "resnet50": resnet50,
    "resnet152": resnet152,
    "cifar": cifar,
    "small": small,
    "second_start": second_start,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}; all without")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    add_device(parser)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.backends.cudnn.benchmark = True
    content = {}
    for name in arguments.sections or SECTIONS:
        started = time.perf_counter()
        content[name] = SECTIONS[name](arguments.device, arguments.rounds)
        print(f"{name}: {time.perf_counter() - started:.0f} s  {json.dumps(content[name])}", file=sys.stderr)
        if arguments.device == "cuda":
            content[name] = record(f"step_{name}", content[name])
    if arguments.json:
        print(json.dumps(content))


if __name__ == "__main__":
    main()
