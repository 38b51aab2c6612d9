"""Batch normalisation of small activations in one launch each way: all programs are resident and wait for each other.

Where an activation is a few megabytes, the launches of `batch_norm` take longer than their work: with images of 32
pixels a ResNet-50's step has 300 of them, of 3 to 7 µs. Here one launch sums, waits for the sums of the others, and
goes on to the elements, which the second pass finds in the L2 cache. The wait is safe because the launch is a
cooperative one, that the driver starts only when all of its programs fit on the device.

Legend as in `batch_norm`; the G programs that share BC columns wait for each other.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotloop.kernels import batch_norm as passes

_SHARE_OF_L2 = 0.4
"""Of the cache that an activation may take; what is larger falls out between the passes."""

_TILE, _WARPS, _PROGRAMS = 8192, 4, 2
"""Elements of a block, warps, and programs for each processor; measured on an H200 with the shapes of a ResNet-50 for
images of 32 pixels. Eight warps for each processor are resident whatever registers they take.
"""


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
             SUM: tl.constexpr, RELU: tl.constexpr, ONE: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    """Statistics of x, and relu(bn(x) + other). ONE: a program has one block of rows, and keeps it in registers."""
    program, column = tl.program_id(0), tl.program_id(1)
    c = column * BC + tl.arange(0, BC)
    rows = program * BM + tl.arange(0, BM)
    inside = (rows < M)[:, None]
    place = rows[:, None].to(tl.int64) * C + c[None, :]
    if ONE:
        value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        distance = tl.where(inside, value - passes.sums_around(base, c)[None, :], 0.0)
        tl.store(partial + (program * 2) * C + c, tl.sum(distance, 0))
        tl.store(partial + (program * 2 + 1) * C + c, tl.sum(distance * distance, 0))
    else:
        passes.sum_rows(x, base, partial, program, c, M, G, C, BM, BC)
    _wait_for_all(arrived + column, program, G)
    first, second = passes.collect(partial, c, G, C, 2, 1, 32, BC)
    scale, shift = passes.keep_statistics(
        first, second, c, base, variance, weight, bias, stats, M, C, momentum, eps, program == 0
    )
    if ONE:
        passes.put_normalised(value, scale, shift, other, other_stats, out, place, inside, c, C, SUM, RELU)
    else:
        for tile in range(program, tl.cdiv(M, BM), G):
            rows = tile * BM + tl.arange(0, BM)
            inside = (rows < M)[:, None]
            place = rows[:, None].to(tl.int64) * C + c[None, :]
            value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
            passes.put_normalised(value, scale, shift, other, other_stats, out, place, inside, c, C, SUM, RELU)


@triton.jit(do_not_specialize=["G"])
def _backward(dy, dy2, x, out, stats, g_out, dx, partial, coefficients, arrived, M, G, C, MASK: tl.constexpr,
              TWO: tl.constexpr, KEEP: tl.constexpr, ONE: tl.constexpr,
              BM: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    """Coefficients and the gradient of x; the masked gradient in g_out if KEEP."""
    program, column = tl.program_id(0), tl.program_id(1)
    c = column * BC + tl.arange(0, BC)
    scale, shift = tl.load(stats + 2 * C + c)[None, :], tl.load(stats + 3 * C + c)[None, :]
    rows = program * BM + tl.arange(0, BM)
    inside = (rows < M)[:, None]
    place = rows[:, None].to(tl.int64) * C + c[None, :]
    if ONE:
        g, value = passes.masked_gradient(dy, dy2, x, out, scale, shift, g_out, place, inside, MASK, TWO, KEEP)
        tl.store(partial + (program * 3) * C + c, tl.sum(g, 0))
        tl.store(partial + (program * 3 + 1) * C + c, tl.sum(g * (value - tl.load(stats + c)[None, :]), 0))
    else:
        passes.sum_gradient_rows(
            dy, dy2, x, out, stats, x, stats, g_out, partial, program, c, M, G, C, MASK, TWO, KEEP, 0, BM, BC
        )
    _wait_for_all(arrived + column, program, G)
    first, second = passes.collect(partial, c, G, C, 3, 1, 32, BC)
    a, b, d = passes.keep_coefficients(first, second, c, stats, coefficients, M, C, program == 0)
    if ONE:
        passes.put_gradient(g, value, a, b, d, dx, place, inside)
    else:
        for tile in range(program, tl.cdiv(M, BM), G):
            rows = tile * BM + tl.arange(0, BM)
            inside = (rows < M)[:, None]
            place = rows[:, None].to(tl.int64) * C + c[None, :]
            g, value = passes.masked_gradient(
                g_out if KEEP else dy, dy, x, x, scale, shift, g_out, place, inside, 0 if KEEP else MASK, False, False
            )
            passes.put_gradient(g, value, a, b, d, dx, place, inside)


@dataclass(frozen=True)
class _Blocks:
    """How x is cut into blocks.

    Attributes:
        rows: pixels, M.
        block_rows: BM.
        block_columns: BC.
        shared: programs that share columns, G.
    """

    rows: int
    channels: int
    block_rows: int
    block_columns: int
    shared: int

    @property
    def grid(self) -> tuple[int, int]:
        return self.shared, self.channels // self.block_columns

    @property
    def one(self) -> bool:
        """Whether each program has one block of rows at most."""
        return self.shared * self.block_rows >= self.rows


def suits(x: Tensor) -> bool:
    """Whether x (B, C, H, W) is small enough, and on a device that can."""
    if not x.is_cuda:
        return False
    device = _properties(x.device.index)
    if x.numel() * x.element_size() > _SHARE_OF_L2 * device.L2_cache_size:
        return False
    return x.shape[1] // _columns(x) <= int(device.multi_processor_count)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, momentum: float, eps: float,
    other: Tensor | None, other_stats: Tensor | None, relu: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """relu(bn(x) + other), channels last, and the statistics (6, C)."""
    blocks = _blocks(x)
    partial = torch.empty(blocks.shared, 2, blocks.channels, dtype=torch.float32, device=x.device)
    stats = torch.empty(6, blocks.channels, dtype=torch.float32, device=x.device)
    out = torch.empty_like(x)
    kind = 0 if other is None else 1 if other_stats is None else 2
    tensors: Any = (x, mean, var, weight, bias, stats, passes.either(other, x), passes.either(other_stats, stats), out)
    _forward[blocks.grid](
        *tensors, partial, _arrivals_of(x.device), blocks.rows, blocks.shared, blocks.channels, momentum, eps,
        kind, relu, blocks.one, blocks.block_rows, blocks.block_columns,
        num_warps=_WARPS, launch_cooperative_grid=True,
    )  # fmt: skip
    return out, stats


def backward(
    dy: Tensor, dy2: Tensor | None, x: Tensor, out: Tensor | None, stats: Tensor, mask: int, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of x, coefficients (5, C), and the masked gradient: dy itself unless `keep`."""
    blocks = _blocks(x)
    partial = torch.empty(blocks.shared, 3, blocks.channels, dtype=torch.float32, device=x.device)
    coefficients = torch.empty(5, blocks.channels, dtype=torch.float32, device=x.device)
    dx = torch.empty_like(x)
    g = torch.empty_like(x) if keep else dy
    tensors: Any = (dy, passes.either(dy2, dy), x, passes.either(out, x), stats, g, dx, partial, coefficients)
    _backward[blocks.grid](
        *tensors, _arrivals_of(x.device), blocks.rows, blocks.shared, blocks.channels, mask, dy2 is not None, keep,
        blocks.one, blocks.block_rows, blocks.block_columns, num_warps=_WARPS, launch_cooperative_grid=True,
    )  # fmt: skip
    return dx, coefficients, g


def _columns(x: Tensor) -> int:
    """Channels of a block: more, so longer reads, where an activation comes from memory rather than from the cache."""
    most = 64 if x.numel() * x.element_size() > _SHARE_OF_L2 / 3 * _properties(x.device.index).L2_cache_size else 32
    return min(most, passes.largest_power(x.shape[1]))


def _blocks(x: Tensor) -> _Blocks:
    channels, block_columns = x.shape[1], _columns(x)
    rows = x.numel() // channels
    block_rows = _TILE // block_columns
    most = _PROGRAMS * _properties(x.device.index).multi_processor_count // (channels // block_columns)
    return _Blocks(rows, channels, block_rows, block_columns, min(most, triton.cdiv(rows, block_rows)))


@functools.cache
def _properties(device: int) -> Any:
    return torch.cuda.get_device_properties(device)


def _arrivals_of(device: torch.device) -> Tensor:
    return _arrivals(device.index, torch.cuda.current_stream(device).cuda_stream)


@functools.cache
def _arrivals(device: int, stream: int) -> Tensor:
    """A barrier for each block of columns, for each stream, whose launches follow one another.

    Kept for good, as captured graphs hold its address.
    """
    return torch.zeros(_properties(device).multi_processor_count, dtype=torch.int32, device=f"cuda:{device}")
