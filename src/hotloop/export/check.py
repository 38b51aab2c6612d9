"""Whether an exported model computes what the model in PyTorch does, and how fast."""

import statistics
import time
from collections.abc import Iterator, Sequence

import numpy as np

from hotloop.core.errors import HotloopError
from hotloop.export.manifest import EAGER, Agreement, Latency, Precision
from hotloop.export.source import Arrays, Forward, Source

_SIZES = (1, 2, 5)
"""Samples of the batches of random inputs."""
_TIMED, _TIMED_BYTES = (1, 32), 2**30
"""Samples of the batches that are timed, as far as their inputs and outputs take no more than that."""
_SECONDS, _FEWEST, _MOST = 0.5, 5, 200
"""Of one measurement."""


def compare(source: Source, forward: Forward, precision: Precision, tolerance: float, samples: int) -> Agreement:
    """Hold outputs against those of PyTorch, for random inputs and real ones, in batches of several sizes.

    Args:
        tolerance: of fp32: the largest difference of two outputs; in another precision it is stated, with metrics
            before and after.
        samples: real ones.

    Raises:
        HotloopError: it is more, or the outputs are of other shapes or not finite.
    """
    real = _real(source, samples)
    first = next(real)
    drawn = list(_random(first)) if precision != "int8" else []  # its ranges are those of real inputs
    error, compared, randoms = 0.0, len(first[0]), sum(len(arrays[0]) for arrays in drawn)
    for arrays in (*drawn, *_sizes(source, first)):
        error = max(error, _difference(source, forward, arrays))
    for arrays in real:
        error = max(error, _difference(source, forward, arrays))
        compared += len(arrays[0])
    allowed = tolerance if precision == "fp32" else None
    if allowed is not None and error > allowed:
        raise HotloopError(
            f"outputs differ from PyTorch's by {error:.3g}; {allowed:g} is allowed",
            f"compared over {randoms} random and {compared} real inputs",
            f"--tolerance {2 * error:.1g} if that is no more than rounding, beside outputs of their size",
        )
    if precision == "fp32":
        return Agreement(error, allowed, randoms, compared)
    before, after = (source.measured(one, samples) for one in (source.eager, forward))
    return Agreement(error, None, randoms, compared, compared, before, after)


def time_both(source: Source, engine: str, forward: Forward) -> tuple[Latency, ...]:
    """Time per batch of one sample and of 32, of the exported model and of PyTorch's, one after the other."""
    sizes = [batch for batch in _TIMED if batch == 1 or batch * source.sample_bytes <= _TIMED_BYTES]
    return tuple(
        time_batch(name, source, one, batch)
        for batch in sizes
        for name, one in ((EAGER, source.eager), (engine, forward))
    )


def time_batch(engine: str, source: Source, forward: Forward, batch: int) -> Latency:
    """Time of a batch of so many real samples, repeated where there are fewer; half a second, five times at least."""
    first = next(_real(source, batch))
    arrays = [np.ascontiguousarray(array[np.arange(batch) % len(array)]) for array in first]
    forward(arrays)
    took: list[float] = []
    until = time.perf_counter() + _SECONDS
    while len(took) < _FEWEST or (len(took) < _MOST and time.perf_counter() < until):
        started = time.perf_counter()
        forward(arrays)
        took.append(1e3 * (time.perf_counter() - started))
    return Latency(engine, batch, statistics.median(took), min(took), max(took), len(took))


def _difference(source: Source, forward: Forward, arrays: Arrays) -> float:
    """The largest of two outputs."""
    expected, found = ([np.atleast_1d(array) for array in one(arrays)] for one in (source.eager, forward))
    shapes = [[array.shape for array in outputs] for outputs in (expected, found)]
    if shapes[0] != shapes[1]:
        raise _wrong(f"outputs are {shapes[1]}, PyTorch's are {shapes[0]}")
    largest = 0.0
    for one, other in zip(expected, found, strict=True):
        if not np.isfinite(one).all():
            cause = "the trained weights give NaN or infinity in PyTorch already"
            raise HotloopError("the model's outputs are not all finite", cause, "name an earlier checkpoint of the run")
        if not np.isfinite(other).all():
            raise _wrong("the exported model's outputs are not all finite")
        for row, other_row in zip(one, other, strict=True):  # all at once they may take gigabytes
            if row.size:
                largest = max(largest, float(np.abs(row.astype(np.float64) - other_row.astype(np.float64)).max()))
    return largest


def _wrong(cause: str) -> HotloopError:
    return HotloopError("the exported model computes something else", cause, "--precision fp32, or another --opset")


def _real(source: Source, samples: int) -> Iterator[Arrays]:
    for batch in source.batches(samples):
        yield [np.ascontiguousarray(tensor.numpy()) for tensor in source.arguments(batch)]


def _sizes(source: Source, arrays: Arrays) -> Iterator[Arrays]:
    """The first samples, in batches of several sizes, and shorter where that may vary."""
    yield arrays
    for size in _SIZES:
        if size < len(arrays[0]):
            yield [array[:size] for array in arrays]
    if all(1 in one.varying for one in source.inputs):
        yield [np.ascontiguousarray(array[:, : array.shape[1] // 2 + 1]) for array in arrays]


def _random(like: Sequence[np.ndarray]) -> Iterator[Arrays]:
    """Normal numbers; whole numbers between the lowest and highest real ones."""
    generator = np.random.default_rng(0)
    for size in _SIZES:
        yield [_drawn(generator, (size, *array.shape[1:]), array) for array in like]


def _drawn(generator: np.random.Generator, shape: tuple[int, ...], like: np.ndarray) -> np.ndarray:
    if like.dtype.kind in "iu":
        return generator.integers(like.min(), like.max(), shape, like.dtype, endpoint=True)
    if like.dtype.kind == "b":
        return generator.random(shape) < 0.5
    return generator.standard_normal(shape).astype(like.dtype)
