"""Batch normalisation with the sum and the ReLU after it, forward and backward, in as few passes as there can be.

Activations lie channels last, as a matrix (M, C): M pixels of the whole batch, C channels. Where the compiler works out
a root and a division for each element and reads the output only for the mask of the ReLU, here each channel's
coefficients are worked out once: y = scale x + shift, dx = a g + b x + d, and the mask is that of y. Sums are of
x - running mean, in float32, in an order that is always the same.

Legend: BM, BC rows and columns of a block; G programs that share the rows. C is no compile-time constant: a network has
a dozen of them, and each would be compiled by itself.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MEAN, RSTD, SCALE, SHIFT, NEW_MEAN, NEW_VAR = range(6)
"""Rows of the statistics, float32 (6, C)."""

A, B, D, D_WEIGHT, D_BIAS = range(5)
"""Rows of the gradient's coefficients, float32 (5, C)."""

_SUMS, _POINTWISE, _BACKWARD_SUMS = (4096, 64, 1056), (4096, 256, 0), (4096, 64, 528)
"""Elements of a block, its columns, and programs (0: one a block); measured on an H200 with ResNet-50's shapes."""


def suits(channels: int) -> bool:
    """Whether blocks fit the channels."""
    return channels % 16 == 0


def largest_power(number: int) -> int:
    """The largest power of two that divides it."""
    return number & -number


def _blocks(kind: tuple[int, int, int], x: Tensor) -> tuple[int, int, int, int, int]:
    """Rows, channels, BM, BC and G for a kernel over x (B, C, H, W)."""
    elements, columns, programs = kind
    channels = x.shape[1]
    rows = x.numel() // channels
    block_columns = math.gcd(channels, columns)
    block_rows = max(1, elements // block_columns)
    tiles = triton.cdiv(rows, block_rows)
    shared = min(tiles, max(1, programs // (channels // block_columns))) if programs else tiles
    return rows, channels, block_rows, block_columns, shared


@triton.jit
def sums_around(base, c):
    """What sums are taken around: the running mean, unless a batch that was not finite has spoiled it for good."""
    mean = tl.load(base + c)
    return tl.where(tl.abs(mean) < 1e30, mean, 0.0)


@triton.jit
def sum_rows(x, base, partial, program, c, M, G, C, BM: tl.constexpr, BC: tl.constexpr):
    """Sums of x - base and of its square over a program's rows, put into `partial` (G, 2, C)."""
    around = sums_around(base, c)[None, :]
    first = tl.zeros([BM, BC], tl.float32)
    second = tl.zeros([BM, BC], tl.float32)
    for tile in range(program, tl.cdiv(M, BM), G):
        rows = tile * BM + tl.arange(0, BM)
        inside = (rows < M)[:, None]
        value = tl.load(x + rows[:, None].to(tl.int64) * C + c[None, :], mask=inside, other=0.0).to(tl.float32)
        value = tl.where(inside, value - around, 0.0)
        first += value
        second += value * value
    tl.store(partial + (program * 2) * C + c, tl.sum(first, 0))
    tl.store(partial + (program * 2 + 1) * C + c, tl.sum(second, 0))


@triton.jit
def collect(partial, c, G, C, WIDTH: tl.constexpr, WHICH: tl.constexpr, BG: tl.constexpr, BC: tl.constexpr):
    """The programs' sums number 0 and WHICH of (G, WIDTH, C), added up."""
    first = tl.zeros([BG, BC], tl.float32)
    second = tl.zeros([BG, BC], tl.float32)
    for start in range(0, G, BG):
        g = start + tl.arange(0, BG)[:, None]
        place = partial + g * WIDTH * C + c[None, :]
        # From the L2 cache: other processors may have written there during this launch.
        first += tl.load(place, mask=g < G, other=0.0, cache_modifier=".cg")
        second += tl.load(place + WHICH * C, mask=g < G, other=0.0, cache_modifier=".cg")
    return tl.sum(first, 0), tl.sum(second, 0)


@triton.jit
def keep_statistics(first, second, c, base, variance, weight, bias, stats, M, C, momentum, eps, keep):
    """From the sums to scale and shift; mean and new running values are stored with them if `keep`."""
    distance = first / M
    mean = sums_around(base, c) + distance
    var = tl.maximum(second / M - distance * distance, 0.0, propagate_nan=tl.PropagateNan.ALL)
    rstd = 1.0 / tl.sqrt(var + eps)
    scale = tl.load(weight + c) * rstd
    shift = tl.load(bias + c) - mean * scale
    if keep:
        tl.store(stats + c, mean)
        tl.store(stats + C + c, rstd)
        tl.store(stats + 2 * C + c, scale)
        tl.store(stats + 3 * C + c, shift)
        tl.store(stats + 4 * C + c, tl.load(base + c) * (1.0 - momentum) + momentum * mean)
        unbiased = var * (M / tl.maximum(M - 1.0, 1.0))
        tl.store(stats + 5 * C + c, tl.load(variance + c) * (1.0 - momentum) + momentum * unbiased)
    return scale, shift


@triton.jit
def put_normalised(value, scale, shift, other, other_stats, out, place, inside, c, C,
                   SUM: tl.constexpr, RELU: tl.constexpr):  # fmt: skip
    """The output relu(scale x + shift + other), SUM 0: no other, 1: as it is, 2: normalised by its own statistics."""
    y = value * scale[None, :] + shift[None, :]
    if SUM >= 1:
        added = tl.load(other + place, mask=inside, other=0.0).to(tl.float32)
        if SUM == 2:
            added = added * tl.load(other_stats + 2 * C + c)[None, :] + tl.load(other_stats + 3 * C + c)[None, :]
        y += added
    if RELU:
        y = tl.maximum(y, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + place, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def masked_gradient(dy, dy2, x, out, scale, shift, g_out, place, inside,
                    MASK: tl.constexpr, TWO: tl.constexpr, KEEP: tl.constexpr):  # fmt: skip
    """The gradient before the ReLU, g, kept in g_out if KEEP; and x.

    MASK 0: none, 1: where bn(x) > 0, 2: where out > 0. TWO: the gradient is dy + dy2, of an output used twice.
    """
    g = tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if TWO:
        g += tl.load(dy2 + place, mask=inside, other=0.0).to(tl.float32)
    if MASK == 1:
        g = tl.where(value * scale + shift > 0.0, g, 0.0)
    if MASK == 2:
        g = tl.where(tl.load(out + place, mask=inside, other=0.0).to(tl.float32) > 0.0, g, 0.0)
    if KEEP:
        rounded = g.to(g_out.dtype.element_ty)
        tl.store(g_out + place, rounded, mask=inside)
        g = rounded.to(tl.float32)
    return g, value


@triton.jit
def sum_gradient_rows(dy, dy2, x, out, stats, other, other_stats, g_out, partial, program, c, M, G, C,
                      MASK: tl.constexpr, TWO: tl.constexpr, KEEP: tl.constexpr, SUM: tl.constexpr,
                      BM: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    """Sums of g and g (x - mean) over a program's rows, put into `partial` (G, 3, C)."""
    mean = tl.load(stats + c)[None, :]
    scale = tl.load(stats + 2 * C + c)[None, :]
    shift = tl.load(stats + 3 * C + c)[None, :]
    if SUM == 2:
        other_mean = tl.load(other_stats + c)[None, :]
        third = tl.zeros([BM, BC], tl.float32)
    first = tl.zeros([BM, BC], tl.float32)
    second = tl.zeros([BM, BC], tl.float32)
    for tile in range(program, tl.cdiv(M, BM), G):
        rows = tile * BM + tl.arange(0, BM)
        inside = (rows < M)[:, None]
        place = rows[:, None].to(tl.int64) * C + c[None, :]
        g, value = masked_gradient(dy, dy2, x, out, scale, shift, g_out, place, inside, MASK, TWO, KEEP)
        first += g
        second += g * (value - mean)
        if SUM == 2:
            third += g * (tl.load(other + place, mask=inside, other=0.0).to(tl.float32) - other_mean)
    tl.store(partial + (program * 3) * C + c, tl.sum(first, 0))
    tl.store(partial + (program * 3 + 1) * C + c, tl.sum(second, 0))
    if SUM == 2:
        tl.store(partial + (program * 3 + 2) * C + c, tl.sum(third, 0))


@triton.jit
def keep_coefficients(sum_g, sum_gx, c, stats, result, M, C, keep):
    """For each channel a, b, d of dx = a g + b x + d; with the gradients of weight and bias stored if `keep`."""
    mean, rstd, a = tl.load(stats + c), tl.load(stats + C + c), tl.load(stats + 2 * C + c)
    b = -a * rstd * rstd * sum_gx / M
    d = -a * sum_g / M - b * mean
    if keep:
        tl.store(result + c, a)
        tl.store(result + C + c, b)
        tl.store(result + 2 * C + c, d)
        tl.store(result + 3 * C + c, sum_gx * rstd)
        tl.store(result + 4 * C + c, sum_g)
    return a, b, d


@triton.jit
def put_gradient(g, value, a, b, d, dx, place, inside):
    """The gradient of x, a g + b x + d."""
    tl.store(dx + place, (g * a[None, :] + value * b[None, :] + d[None, :]).to(dx.dtype.element_ty), mask=inside)


@triton.jit
def _sums(x, base, partial, M, G, C, BM: tl.constexpr, BC: tl.constexpr):
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    sum_rows(x, base, partial, tl.program_id(0), c, M, G, C, BM, BC)


@triton.jit
def _statistics(partial, base, variance, weight, bias, stats, M, G, momentum, eps, C, BG: tl.constexpr):
    """From the programs' sums to the statistics; 16 channels a program."""
    c = tl.program_id(0) * 16 + tl.arange(0, 16)
    first, second = collect(partial, c, G, C, 2, 1, BG, 16)
    keep_statistics(first, second, c, base, variance, weight, bias, stats, M, C, momentum, eps, True)


@triton.jit
def _normalise(x, stats, other, other_stats, out, M, C, SUM: tl.constexpr, RELU: tl.constexpr,
               BM: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = (rows < M)[:, None]
    place = rows[:, None].to(tl.int64) * C + c[None, :]
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    scale, shift = tl.load(stats + 2 * C + c), tl.load(stats + 3 * C + c)
    put_normalised(value, scale, shift, other, other_stats, out, place, inside, c, C, SUM, RELU)


@triton.jit
def _gradient_sums(dy, dy2, x, out, stats, other, other_stats, g_out, partial, M, G, C,
                   MASK: tl.constexpr, TWO: tl.constexpr, KEEP: tl.constexpr, SUM: tl.constexpr,
                   BM: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    sum_gradient_rows(dy, dy2, x, out, stats, other, other_stats, g_out, partial, tl.program_id(0), c, M, G, C,
                      MASK, TWO, KEEP, SUM, BM, BC)  # fmt: skip


@triton.jit
def _coefficients(partial, stats, result, M, G, C, WHICH: tl.constexpr, BG: tl.constexpr):
    """From the programs' sums to the coefficients, 16 channels a program; WHICH of the sums of g (x - mean)."""
    c = tl.program_id(0) * 16 + tl.arange(0, 16)
    first, second = collect(partial, c, G, C, 3, WHICH, BG, 16)
    keep_coefficients(first, second, c, stats, result, M, C, True)


@triton.jit
def _input_gradient(g_in, x, stats, coefficients, dx, other, other_coefficients, d_other, M, C,
                    MASK: tl.constexpr, SUM: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    """The gradient of x, and the same for the other input; MASK 0 if g_in is masked already."""
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = (rows < M)[:, None]
    place = rows[:, None].to(tl.int64) * C + c[None, :]
    scale = tl.load(stats + 2 * C + c)[None, :]
    shift = tl.load(stats + 3 * C + c)[None, :]
    g, value = masked_gradient(g_in, g_in, x, x, scale, shift, dx, place, inside, MASK, False, False)
    a, b, d = (tl.load(coefficients + c), tl.load(coefficients + C + c),
               tl.load(coefficients + 2 * C + c))  # fmt: skip
    put_gradient(g, value, a, b, d, dx, place, inside)
    if SUM == 2:
        a, b, d = (tl.load(other_coefficients + c), tl.load(other_coefficients + C + c),
                   tl.load(other_coefficients + 2 * C + c))  # fmt: skip
        value = tl.load(other + place, mask=inside, other=0.0).to(tl.float32)
        put_gradient(g, value, a, b, d, d_other, place, inside)


def channels_last(x: Tensor) -> Tensor:
    """X (B, C, H, W) with its channels side by side in memory."""
    return x.contiguous(memory_format=torch.channels_last)


def statistics(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, momentum: float, eps: float
) -> Tensor:
    """The batch's statistics of x, channels last, and the running values after it: (6, C)."""
    rows, channels, block_rows, block_columns, shared = _blocks(_SUMS, x)
    partial = torch.empty(shared, 2, channels, dtype=torch.float32, device=x.device)
    grid = (shared, channels // block_columns)
    _sums[grid](x, mean, partial, rows, shared, channels, block_rows, block_columns, num_warps=4)
    return finish_statistics(partial, weight, bias, mean, var, rows, momentum, eps)


def finish_statistics(
    partial: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, rows: int, momentum: float, eps: float
) -> Tensor:
    """From sums of x - mean and their squares, (G, 2, C), to the statistics."""
    shared, _, channels = partial.shape
    stats = torch.empty(6, channels, dtype=torch.float32, device=partial.device)
    grid = (channels // 16,)
    _statistics[grid](partial, mean, var, weight, bias, stats, rows, shared, momentum, eps, channels, 256, num_warps=4)
    return stats


def normalise(x: Tensor, stats: Tensor, other: Tensor | None, other_stats: Tensor | None, relu: bool) -> Tensor:
    """relu(bn(x) + other), all channels last."""
    rows, channels, block_rows, block_columns, tiles = _blocks(_POINTWISE, x)
    out = torch.empty_like(x)
    kind = 0 if other is None else 1 if other_stats is None else 2
    grid = (tiles, channels // block_columns)
    arguments: Any = (x, stats, either(other, x), either(other_stats, stats), out, rows, channels, kind, relu)
    _normalise[grid](*arguments, block_rows, block_columns, num_warps=4)
    return out


def gradient(
    dy: Tensor, dy2: Tensor | None, x: Tensor, out: Tensor | None, stats: Tensor, other: Tensor | None,
    other_stats: Tensor | None, mask: int, keep: bool, count: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The masked gradient (dy itself unless `keep`), and the coefficients (5, C) for x and for the other input.

    Args:
        count: pixels that the statistics were of; those of x without.
    """
    rows, channels, block_rows, block_columns, shared = _blocks(_BACKWARD_SUMS, x)
    partial = torch.empty(shared, 3, channels, dtype=torch.float32, device=x.device)
    g = torch.empty_like(x) if keep else dy
    kind = 0 if other_stats is None else 2
    grid = (shared, channels // block_columns)
    arguments: Any = (
        dy,
        either(dy2, dy),
        x,
        either(out, x),
        stats,
        either(other, x),
        either(other_stats, stats),
        g,
        partial,
    )
    _gradient_sums[grid](
        *arguments, rows, shared, channels, mask, dy2 is not None, keep, kind, block_rows, block_columns, num_warps=4
    )
    found = []
    for which, of in ((1, stats), (2, other_stats)):
        result = torch.empty(5, channels, dtype=torch.float32, device=x.device)
        if of is not None:
            _coefficients[(channels // 16,)](
                partial, of, result, count or rows, shared, channels, which, 256, num_warps=4
            )
        found.append(result)
    return g, found[0], found[1]


def input_gradient(
    g: Tensor,
    x: Tensor,
    stats: Tensor,
    coefficients: Tensor,
    other: Tensor | None,
    other_coefficients: Tensor,
    mask: int,
) -> tuple[Tensor, Tensor]:
    """Gradients of x and, if it was normalised too, of the other input."""
    rows, channels, block_rows, block_columns, tiles = _blocks(_POINTWISE, x)
    dx = torch.empty_like(x)
    d_other = torch.empty_like(x) if other is not None else dx
    grid = (tiles, channels // block_columns)
    arguments: Any = (
        g,
        x,
        stats,
        coefficients,
        dx,
        either(other, x),
        other_coefficients,
        d_other,
        rows,
        channels,
        mask,
    )
    _input_gradient[grid](*arguments, 0 if other is None else 2, block_rows, block_columns, num_warps=4)
    return dx, d_other


def either(tensor: Tensor | None, instead: Tensor) -> Tensor:
    """A kernel's argument that it will not read."""
    return instead if tensor is None else tensor
