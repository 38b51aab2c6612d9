"""What step benchmarks are made of: contenders that train on one batch a call, timed in turns."""

import gc
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import hotloop

Train = Callable[[], object]
Spread = Callable[[nn.Module], nn.Module]
"""Puts a model on several ranks."""


@dataclass(frozen=True)
class Image:
    """A batch of images: sizes and classes.

    Attributes:
        batch: images.
        size: pixels a side.
    """

    batch: int
    size: int
    classes: int

    def draw(self, device: str, channels_last: bool) -> tuple[Tensor, Tensor]:
        images = torch.randn(self.batch, 3, self.size, self.size, device=device)
        layout = torch.channels_last if channels_last else torch.contiguous_format
        labels = torch.randint(0, self.classes, (self.batch,), device=device)
        return images.contiguous(memory_format=layout), labels


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def captured(step: Callable[[], object], warm_up: int) -> torch.cuda.CUDAGraph:
    """A step captured by hand; keep the step: the graph knows addresses only."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm_up):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def hand_written(
    make: Callable[[], nn.Module], image: Image, device: str, dtype: torch.dtype | None, channels_last: bool,
    compile_mode: str | None, fused: bool, spread: Spread = lambda model: model,
) -> Train:  # fmt: skip
    """The loop that guides show, in one of its variants."""
    model = make().to(device)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model = spread(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=fused)
    network = torch.compile(model, mode=compile_mode) if compile_mode else model
    scaler = torch.amp.GradScaler(device, enabled=dtype is torch.float16)
    images, labels = image.draw(device, channels_last)

    def train() -> object:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, dtype=dtype) if dtype else nullcontext():
            loss = functional.cross_entropy(network(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return None

    return train


def hotloop_step(
    make: Callable[[], nn.Module], image: Image, device: str, own_kernels: bool = True,
    spread: Spread = lambda model: model, told: Callable[[str], None] = print,
) -> Train:  # fmt: skip
    """The same through `hotloop.Step`, as `train` sets it up on a GPU for a long run."""
    model = spread(make().to(device, memory_format=torch.channels_last))  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    gpu = device == "cuda"
    precision = "bf16" if gpu else "fp32"  # the CPU's own format
    settings = hotloop.StepSettings(precision=precision, compile="model" if gpu else "", own_kernels=own_kernels)
    step = hotloop.Step(
        model, lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]), optimizer,
        lambda number: 1 / (1 + number), settings, told,
    )  # fmt: skip
    batch = image.draw(device, channels_last=True)
    return lambda: step.run(batch)


@dataclass(frozen=True)
class Measured:
    """A contender's figures.

    Attributes:
        rates: batches a second, one for each round.
        first_seconds: of the first call.
        peak_bytes: allocated at the most, by this contender alone.
    """

    rates: list[float]
    first_seconds: float
    peak_bytes: int


def measure(contenders: dict[str, Callable[[], Train]], device: str, rounds: int, steps: int) -> dict[str, Measured]:
    """Make each contender, let it warm up, then time all in turns.

    Each is made alone, so that its peak memory is its own; all stay, so that rounds can alternate.
    """
    trains: dict[str, Train] = {}
    first: dict[str, float] = {}
    peaks: dict[str, int] = {}
    for name, make in contenders.items():
        gc.collect()
        before = torch.cuda.memory_allocated() if device == "cuda" else 0
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        trains[name] = make()
        started = time.perf_counter()
        trains[name]()
        synchronize(device)
        first[name] = time.perf_counter() - started
        for _ in range(6):
            trains[name]()
        synchronize(device)
        peaks[name] = torch.cuda.max_memory_allocated() - before if device == "cuda" else 0
        print(f"{name}: first step {first[name]:.1f} s, {peaks[name] / 2**30:.2f} GiB", file=sys.stderr, flush=True)
    rates: dict[str, list[float]] = {name: [] for name in trains}
    for _ in range(rounds):
        for name, train in trains.items():
            synchronize(device)
            started = time.perf_counter()
            for _ in range(steps):
                train()
            synchronize(device)
            rates[name].append(steps / (time.perf_counter() - started))
    return {name: Measured(rates[name], first[name], peaks[name]) for name in trains}


def ratios(measured: dict[str, Measured], ours: str) -> dict[str, float]:
    """Our median rate over each rival's."""
    own = statistics.median(measured[ours].rates)
    return {name: own / statistics.median(other.rates) for name, other in measured.items() if name != ours}


def figures(measured: dict[str, Measured], samples: int) -> dict[str, Any]:
    """As plain data: samples a second with spread, first call, peak memory."""
    from record import Figure

    return {
        name: {
            "samples_per_second": vars(Figure.of([rate * samples for rate in one.rates], "1/s")),
            "first_step_seconds": one.first_seconds,
            "peak_gib": one.peak_bytes / 2**30,
        }
        for name, one in measured.items()
    }
