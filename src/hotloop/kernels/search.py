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

_IDLE_SECONDS = 1.0
_WARM_UP_MS, _WARM_UP_IDLE_MS, _TIMED_MS = 1.0, 300.0, 6.0


class _Ways(threading.local):
    """PyTorch keeps what it found for each thread.

    Attributes:
        chosen: whether calls with a key take what was searched, else what cuDNN proposes.
        latest: when the GPU was last busy, in seconds.
        has_room: memory has sufficed for timing.
    """

    def __init__(self) -> None:
        self.chosen: dict[Hashable, bool] = {}
        self.latest = float("-inf")
        self.has_room = True


_ways = _Ways()
_settings = threading.RLock()
"""Held while they are changed: they are the process's, and another thread would take them for what is wanted."""


def searched(run: Callable[[], Found], key: Hashable) -> Found:
    """What `run`, a convolution of 16-bit numbers on the current GPU, returns, in the faster way.

    Costs some 20 ms, beside the search itself, at the first call of a thread with this key, and waits for the GPU then.

    Args:
        key: of all calls that may take one way: shapes, types, settings.
    """
    cudnn = torch.backends.cudnn
    with _settings:
        if not cudnn.benchmark or cudnn.deterministic or torch.are_deterministic_algorithms_enabled():
            return run()
        search = _ways.chosen.get(key)
        if search is None and torch.cuda.is_current_stream_capturing():
            search = False  # it waits for the GPU
        elif search is None:
            search = _ways.chosen[key] = _is_faster_searched(run)
        with _way(search):
            return run()


def _is_faster_searched(run: Callable[[], object]) -> bool:
    from triton.testing import do_bench

    def fastest(search: bool) -> float:
        with _way(search):
            run()
            idle = time.perf_counter() - _ways.latest > _IDLE_SECONDS
            found: float = do_bench(
                run, warmup=_WARM_UP_IDLE_MS if idle else _WARM_UP_MS, rep=_TIMED_MS, return_mode="min"
            )
        _ways.latest = time.perf_counter()
        return found

    try:
        return min((False, True), key=fastest) if _ways.has_room else True
    except torch.OutOfMemoryError:  # timing takes 256 MB
        _ways.has_room = False
        return True
    except RuntimeError:  # cuDNN's own where it has no room; what is wrong with the convolution itself comes once more
        return True


@contextmanager
def _way(search: bool) -> Iterator[None]:
    cudnn: Any = torch.backends.cudnn
    benchmark, place, precision = cudnn.benchmark, None, ""
    try:
        cudnn.benchmark = search
        if (cudnn.conv.fp32_precision == "tf32") != search:
            place = _place_of_precision()
            precision = place.fp32_precision
            place.fp32_precision = "tf32" if search else "ieee"
        yield
    finally:
        cudnn.benchmark = benchmark
        if place is not None:
            place.fp32_precision = precision


def _place_of_precision() -> Any:
    """The setting that convolutions take their precision from: their own, cuDNN's or that of all.

    One that was not set tells what it follows; were that written back, it would follow no more.
    """
    cudnn: Any = torch.backends.cudnn
    if _follows(cudnn.conv, torch.backends):
        return torch.backends
    return cudnn if not _follows(cudnn, torch.backends) and _follows(cudnn.conv, cudnn) else cudnn.conv


def _follows(one: Any, other: Any) -> bool:
    before = other.fp32_precision
    found = set()
    try:
        for precision in ("ieee", "tf32"):
            other.fp32_precision = precision
            found.add(one.fp32_precision)
    finally:
        other.fp32_precision = before
    return len(found) > 1
