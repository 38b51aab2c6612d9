"""Batch normalisation of small activations in one launch each way: all programs are resident and wait for each other.

Where an activation is a few megabytes, the launches of `batch_norm` take longer than their work: with images of 32
pixels a ResNet-50's step has 300 of them, of 3 to 7 µs. Here one launch sums, waits for the sums of the others, and
goes on to the elements, which the second pass finds in the L2 cache. The wait is safe because the launch is a
cooperative one, that the driver starts only when all of its programs fit on the device.

Legend as in `batch_norm`; the G programs that share BC columns wait for each other.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotloop.kernels import batch_norm as passes

_LARGEST_BYTES = 24 * 2**20
"""Activations up to this size; larger ones fall out of the L2 cache between the passes."""

_TILE, _COLUMNS, _WARPS = 4096, 32, 8


@triton.jit
def _wait_for_all(arrived, program, G):
    """A barrier of G programs. The highest bit of `arrived`, int32, turns over when the last one has come, and nothing
    is left in the others: it needs no reset.
    """
    if G > 1:
        tl.debug_barrier()
        step = tl.where(program == 0, 2147483647 - (G - 2), 1)
        before = tl.atomic_add(arrived, step, sem="release", scope="gpu")
        now = before
        while (before ^ now) >= 0:
            now = tl.atomic_add(arrived, 0, sem="acquire", scope="gpu")
        tl.debug_barrier()


@triton.jit(do_not_specialize=["G"])
def _forward(x, base, variance, weight, bias, stats, other, other_stats, out, partial, arrived, M, G, C, momentum, eps,
             SUM: tl.constexpr, RELU: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, BG: tl.constexpr):  # fmt: skip
    """Statistics of x, and relu(bn(x) + other)."""
    program, column = tl.program_id(0), tl.program_id(1)
    c = column * BC + tl.arange(0, BC)
    passes.sum_rows(x, base, partial, program, c, M, G, C, BM, BC)
    _wait_for_all(arrived + column, program, G)
    first, second = passes.collect(partial, c, G, C, 2, 1, BG, BC)
    scale, shift = passes.keep_statistics(
        first, second, c, base, variance, weight, bias, stats, M, C, momentum, eps, program == 0
    )
    for tile in range(program, tl.cdiv(M, BM), G):
        rows = tile * BM + tl.arange(0, BM)
        passes.normalise_rows(x, scale, shift, other, other_stats, out, rows, c, M, C, SUM, RELU)


@triton.jit(do_not_specialize=["G"])
def _backward(dy, dy2, x, out, stats, g_out, dx, partial, coefficients, arrived, M, G, C, MASK: tl.constexpr,
              TWO: tl.constexpr, KEEP: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, BG: tl.constexpr):  # fmt: skip
    """Coefficients and the gradient of x; the masked gradient in g_out if KEEP."""
    program, column = tl.program_id(0), tl.program_id(1)
    c = column * BC + tl.arange(0, BC)
    passes.sum_gradient_rows(
        dy, dy2, x, out, stats, x, stats, g_out, partial, program, c, M, G, C, MASK, TWO, KEEP, 0, BM, BC
    )
    _wait_for_all(arrived + column, program, G)
    first, second = passes.collect(partial, c, G, C, 3, 1, BG, BC)
    a, b, d = passes.keep_coefficients(first, second, c, stats, coefficients, M, C, program == 0)
    for tile in range(program, tl.cdiv(M, BM), G):
        rows = tile * BM + tl.arange(0, BM)
        passes.differentiate_rows(g_out if KEEP else dy, x, stats, a, b, d, dx, rows, c, M, C, 0 if KEEP else MASK)


def suits(x: Tensor) -> bool:
    """Whether x (B, C, H, W) is small enough, and on a device that can."""
    if not x.is_cuda or x.numel() * x.element_size() > _LARGEST_BYTES:
        return False
    return x.shape[1] // _columns(x) <= _processors(x.device.index)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, momentum: float, eps: float,
    other: Tensor | None, other_stats: Tensor | None, relu: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """relu(bn(x) + other), channels last, and the statistics (6, C)."""
    rows, channels, block_rows, block_columns, shared = _blocks(x)
    partial = torch.empty(shared, 2, channels, device=x.device)
    stats = torch.empty(6, channels, device=x.device)
    out = torch.empty_like(x)
    kind = 0 if other is None else 1 if other_stats is None else 2
    tensors: Any = (x, mean, var, weight, bias, stats, passes.either(other, x), passes.either(other_stats, stats), out)
    _forward[shared, channels // block_columns](
        *tensors, partial, _arrivals(x.device.index), rows, shared, channels, momentum, eps, kind, relu,
        block_rows, block_columns, _group(shared), num_warps=_WARPS, launch_cooperative_grid=True,
    )  # fmt: skip
    return out, stats


def backward(
    dy: Tensor, dy2: Tensor | None, x: Tensor, out: Tensor | None, stats: Tensor, mask: int, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of x, coefficients (5, C), and the masked gradient: dy itself unless `keep`."""
    rows, channels, block_rows, block_columns, shared = _blocks(x)
    partial = torch.empty(shared, 3, channels, device=x.device)
    coefficients = torch.empty(5, channels, device=x.device)
    dx = torch.empty_like(x)
    g = torch.empty_like(x) if keep else dy
    tensors: Any = (dy, passes.either(dy2, dy), x, passes.either(out, x), stats, g, dx, partial, coefficients)
    _backward[shared, channels // block_columns](
        *tensors, _arrivals(x.device.index), rows, shared, channels, mask, dy2 is not None, keep,
        block_rows, block_columns, _group(shared), num_warps=_WARPS, launch_cooperative_grid=True,
    )  # fmt: skip
    return dx, coefficients, g


def _columns(x: Tensor) -> int:
    return min(_COLUMNS, passes.largest_power(x.shape[1]))


def _blocks(x: Tensor) -> tuple[int, int, int, int, int]:
    """Rows, channels, BM, BC and G: one program for each processor of the device, at most."""
    channels, block_columns = x.shape[1], _columns(x)
    rows = x.numel() // channels
    block_rows = _TILE // block_columns
    most = _processors(x.device.index) // (channels // block_columns)
    return rows, channels, block_rows, block_columns, min(most, triton.cdiv(rows, block_rows))


def _group(shared: int) -> int:
    """Programs whose sums are collected at once; few sizes, as each is compiled by itself."""
    return 8 if shared <= 8 else 32 if shared <= 32 else 128


@functools.cache
def _processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _arrivals(device: int) -> Tensor:
    """A barrier for each block of columns; kept for good, as captured graphs hold its address."""
    return torch.zeros(_processors(device), dtype=torch.int32, device=f"cuda:{device}")
