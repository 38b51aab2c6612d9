"""Which of cuDNN's algorithms a convolution takes.

`torch.backends.cudnn.benchmark` times each of them once, in the first step, when the GPU has just come out of a
compilation. Four H200s that searched so needed between 13.0 and 13.4 ms for the convolutions of a step of ResNet-50,
and ranks wait for the slowest. Here it searches when the clock is up, and takes what it finds only where that is
faster than what cuDNN proposes, each timed several times.

What was found is kept by a key that holds whether TF32 is allowed, which means nothing to numbers of 16 bits: under
each of its two values one way can be kept
(https://github.com/pytorch/pytorch/blob/v2.11.0/aten/src/ATen/native/cudnn/Conv_v8.cpp).
"""

import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

Found = TypeVar("Found")

_PROPOSED, _SEARCHED = "ieee", "tf32"
_IDLE_SECONDS = 1.0
_WARM_UP_MS, _WARM_UP_IDLE_MS, _TIMED_MS = 1.0, 300.0, 3.0


class _Ways(threading.local):
    """PyTorch keeps what it found for each thread."""

    def __init__(self) -> None:
        self.chosen: dict[Hashable, str] = {}
        self.latest = float("-inf")
        self.has_room = True


_ways = _Ways()
_settings = threading.RLock()
"""Held while they are changed: they are the process's, and another thread would take them for what is wanted."""


def searched(run: Callable[[], Found], key: Hashable) -> Found:
    """What `run`, a convolution of 16-bit numbers on the current GPU, returns, in the faster way.

    Costs some 10 ms, beside the search itself, at the first call of a thread with this key.

    Args:
        key: of all calls that may take one way: shapes, types, settings.
    """
    cudnn = torch.backends.cudnn
    with _settings:
        if not cudnn.benchmark or cudnn.deterministic or torch.are_deterministic_algorithms_enabled():
            return run()
        way = _ways.chosen.get(key)
        if way is None and torch.cuda.is_current_stream_capturing():
            way = _PROPOSED  # a search waits for the GPU
        elif way is None:
            way = _ways.chosen[key] = _faster(run)
        with _way(way):
            return run()


def _faster(run: Callable[[], object]) -> str:
    from triton.testing import do_bench

    def fastest(way: str) -> float:
        idle = time.perf_counter() - _ways.latest > _IDLE_SECONDS
        with _way(way):
            run()
            found: float = do_bench(
                run, warmup=_WARM_UP_IDLE_MS if idle else _WARM_UP_MS, rep=_TIMED_MS, return_mode="min"
            )
        _ways.latest = time.perf_counter()
        return found

    try:
        return min((_PROPOSED, _SEARCHED), key=fastest) if _ways.has_room else _SEARCHED
    except torch.OutOfMemoryError:  # timing takes 256 MB
        _ways.has_room = False
        return _SEARCHED


@contextmanager
def _way(way: str) -> Iterator[None]:
    cudnn: Any = torch.backends.cudnn
    wanted = way, way == _SEARCHED
    before = cudnn.conv.fp32_precision, cudnn.benchmark
    if before == wanted:
        yield
        return
    cudnn.conv.fp32_precision, cudnn.benchmark = wanted
    try:
        yield
    finally:
        cudnn.conv.fp32_precision, cudnn.benchmark = before
