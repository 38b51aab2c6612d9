"""First weights of large models, drawn by several threads."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn


def undrawn(layer: type[nn.Module], *arguments: Any, **options: Any) -> Any:
    """A layer of torch whose weights are not set: torch would draw them here, and the model again."""
    options["device"] = torch.get_default_device()
    return nn.utils.skip_init(layer, *arguments, **options)  # type: ignore[no-untyped-call]


def draw_normal(weights: Sequence[tuple[Tensor, float]]) -> None:
    """Draw weights on the CPU, each with a deviation of its own.

    Each has its own generator, whose seed comes from torch's: the numbers are the same with any number of threads.
    12 ns a number and thread. Weights on the meta device stay as they are.
    """
    seeds = torch.randint(2**62, (len(weights),), device="cpu").tolist()

    def draw(weight: Tensor, deviation: float, seed: int) -> None:
        if not weight.is_meta:
            with torch.no_grad():
                weight.normal_(0, deviation, generator=torch.Generator().manual_seed(seed))

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for _ in pool.map(draw, *zip(*weights, strict=True), seeds):
            pass
