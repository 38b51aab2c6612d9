"""The beginning of a ResNet as one operator: convolution 7 × 7 with stride 2 of three channels to 64, normalisation,
ReLU, maximum over 3 × 3 with stride 2.

Three channels are too few for the matrix units: cuDNN pads them. Here each 2 × 2 patch becomes one pixel of twelve
channels (padded to 16), so that the convolution is one of 4 × 4 with stride 1, four products of depth 64; the sums for
the normalisation fall out of it. Backward, the gradient of the convolution's output is worked out where the weight's
gradient needs it and never written down. The input's gradient is not computed.

Legend: N images, H × W pixels; SH × SW patches; OH × OW the convolution's output; PH × PW the maxima; BM rows of a
block; G programs that share the rows; P pixels.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from hotloop.kernels import batch_norm as norm

_CONVOLUTION, _POOL, _WEIGHT = (128, 4, 1056), (16, 4, 0), (128, 8, 132)
"""Rows of a block, warps, programs; measured on an H200 with batches of 256."""


@triton.jit
def _patches(x, out, N, stride_n, stride_c, stride_h, stride_w, H, W, SH, SW, BLOCK: tl.constexpr):
    """Each 2 × 2 patch of the image, a border of 3 around it, as one pixel of 16 channels."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    channel = (place % 16).to(tl.int32)
    rest = place // 16
    sw = (rest % SW).to(tl.int32)
    rest = rest // SW
    sh = (rest % SH).to(tl.int32)
    n = rest // SH
    h = 2 * sh + channel // 6 - 3
    w = 2 * sw + (channel // 3) % 2 - 3
    inside = (channel < 12) & (h >= 0) & (h < H) & (w >= 0) & (w < W) & (n < N)
    source = x + n * stride_n + (channel % 3) * stride_c + h * stride_h + w * stride_w
    tl.store(out + place, tl.load(source, mask=inside, other=0).to(out.dtype.element_ty), mask=n < N)


@triton.jit
def _convolve(patches, weight, base, y, partial, P, G, SH, SW, OH, OW, BM: tl.constexpr):
    """The convolution, and sums of y - base and of its square."""
    program = tl.program_id(0)
    k = tl.arange(0, 64)
    c = tl.arange(0, 64)
    around = norm.sums_around(base, c)[None, :]
    first = tl.zeros([64], tl.float32)
    second = tl.zeros([64], tl.float32)
    for tile in range(program, tl.cdiv(P, BM), G):
        p = tile * BM + tl.arange(0, BM).to(tl.int64)
        inside = (p < P)[:, None]
        ow = p % OW
        oh = (p // OW) % OH
        n = p // OW // OH
        total = tl.zeros([BM, 64], tl.float32)
        for row in tl.static_range(4):
            start = ((n * SH + oh + row) * SW + ow) * 16
            a = tl.load(patches + start[:, None] + k[None, :], mask=inside, other=0.0)
            total = tl.dot(a, tl.load(weight + row * 4096 + k[:, None] * 64 + c[None, :]), total)
        rounded = total.to(y.dtype.element_ty)
        tl.store(y + p[:, None] * 64 + c[None, :], rounded, mask=inside)
        value = tl.where(inside, rounded.to(tl.float32) - around, 0.0)
        first += tl.sum(value, 0)
        second += tl.sum(value * value, 0)
    tl.store(partial + program * 128 + c, first)
    tl.store(partial + program * 128 + 64 + c, second)


@triton.jit
def _pool(y, stats, out, chosen, which, P, OH, OW, PH, PW, BM: tl.constexpr):
    """Normalise, ReLU and maximum; what was chosen (before the normalisation) and which of nine."""
    p = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    c = tl.arange(0, 64)
    inside = p < P
    pw = p % PW
    ph = (p // PW) % PH
    n = p // PW // PH
    scale = tl.load(stats + 128 + c)[None, :]
    shift = tl.load(stats + 192 + c)[None, :]
    best = tl.full([BM, 64], -1.0, tl.float32)
    best_value = tl.zeros([BM, 64], tl.float32)
    best_place = tl.zeros([BM, 64], tl.int32)
    for d in tl.static_range(9):
        h = 2 * ph - 1 + d // 3
        w = 2 * pw - 1 + d % 3
        there = ((h >= 0) & (h < OH) & (w >= 0) & (w < OW) & inside)[:, None]
        value = tl.load(y + (((n * OH + h) * OW + w) * 64)[:, None] + c[None, :], mask=there, other=0.0).to(tl.float32)
        z = tl.maximum(value * scale + shift, 0.0, propagate_nan=tl.PropagateNan.ALL)
        z = tl.where(there, z.to(y.dtype.element_ty).to(tl.float32), -1.0)
        take = (z > best) | (z != z)  # NaN too, as torch has it
        best = tl.where(take, z, best)
        best_value = tl.where(take, value, best_value)
        best_place = tl.where(take, d, best_place)
    place = p[:, None] * 64 + c[None, :]
    tl.store(out + place, best.to(out.dtype.element_ty), mask=inside[:, None])
    tl.store(chosen + place, best_value.to(out.dtype.element_ty), mask=inside[:, None])
    tl.store(which + place, best_place.to(tl.int8), mask=inside[:, None])


@triton.jit
def _weight_gradient(patches, y, g_pool, which, coefficients, partial, P, G, SH, SW, OH, OW, PH, PW, BM: tl.constexpr):
    """Gather the maxima's gradients, go back through the normalisation, multiply with the patches; all in one pass."""
    program = tl.program_id(0)
    k = tl.arange(0, 64)
    c = tl.arange(0, 64)
    a = tl.load(coefficients + c)[None, :]
    b = tl.load(coefficients + 64 + c)[None, :]
    d = tl.load(coefficients + 128 + c)[None, :]
    row0 = tl.zeros([64, 64], tl.float32)
    row1 = tl.zeros([64, 64], tl.float32)
    row2 = tl.zeros([64, 64], tl.float32)
    row3 = tl.zeros([64, 64], tl.float32)
    for tile in range(program, tl.cdiv(P, BM), G):
        p = tile * BM + tl.arange(0, BM).to(tl.int64)
        inside = p < P
        ow = p % OW
        oh = (p // OW) % OH
        n = p // OW // OH
        g = tl.zeros([BM, 64], tl.float32)
        for i in tl.static_range(2):
            ph = (oh + 1) // 2 - i
            dh = oh + 1 - 2 * ph
            for j in tl.static_range(2):
                pw = (ow + 1) // 2 - j
                dw = ow + 1 - 2 * pw
                there = ((ph >= 0) & (ph < PH) & (dh <= 2) & (pw >= 0) & (pw < PW) & (dw <= 2) & inside)[:, None]
                place = (((n * PH + ph) * PW + pw) * 64)[:, None] + c[None, :]
                source = tl.load(which + place, mask=there, other=-1).to(tl.int64)
                value = tl.load(g_pool + place, mask=there, other=0.0).to(tl.float32)
                g += tl.where(source == (dh * 3 + dw)[:, None], value, 0.0)
        value = tl.load(y + p[:, None] * 64 + c[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
        dy = tl.where(inside[:, None], g * a + value * b + d, 0.0).to(y.dtype.element_ty)
        start = patches + (((n * SH + oh) * SW + ow) * 16)[:, None] + k[None, :]
        row0 = tl.dot(tl.trans(tl.load(start, mask=inside[:, None], other=0.0)), dy, row0)
        row1 = tl.dot(tl.trans(tl.load(start + SW * 16, mask=inside[:, None], other=0.0)), dy, row1)
        row2 = tl.dot(tl.trans(tl.load(start + SW * 32, mask=inside[:, None], other=0.0)), dy, row2)
        row3 = tl.dot(tl.trans(tl.load(start + SW * 48, mask=inside[:, None], other=0.0)), dy, row3)
    place = partial + program * 16384 + k[:, None] * 64 + c[None, :]
    tl.store(place, row0)
    tl.store(place + 4096, row1)
    tl.store(place + 8192, row2)
    tl.store(place + 12288, row3)


@dataclass(frozen=True)
class _Sizes:
    """Of an image batch on its way through; see the legend."""

    n: int
    h: int
    w: int

    @property
    def output(self) -> tuple[int, int]:
        return (self.h - 1) // 2 + 1, (self.w - 1) // 2 + 1

    @property
    def patches(self) -> tuple[int, int]:
        return self.output[0] + 3, self.output[1] + 3

    @property
    def pool(self) -> tuple[int, int]:
        return (self.output[0] - 1) // 2 + 1, (self.output[1] - 1) // 2 + 1

    @property
    def patch_numbers(self) -> int:
        """Room for the patches; a row of four reads past the last one."""
        return self.n * self.patches[0] * self.patches[1] * 16 + 64


def arranged_weight(weight: Tensor) -> Tensor:
    """The convolution's weight (64, 3, 7, 7) as four rows of patches: (4, 64, 64); differentiable."""
    padded = functional.pad(weight, (0, 1, 0, 1)).view(64, 3, 4, 2, 4, 2)
    rows = padded.permute(2, 4, 3, 5, 1, 0).reshape(4, 4, 12, 64)
    return functional.pad(rows, (0, 0, 0, 4)).reshape(4, 64, 64)


@torch.library.custom_op("hotloop::stem", mutates_args=())
def stem(
    x: Tensor, weight: Tensor, gain: Tensor, bias: Tensor, mean: Tensor, var: Tensor, momentum: float, eps: float
) -> list[Tensor]:
    """The maxima, and what backward needs: patches, the convolution's output, what was chosen, which, statistics."""
    sizes = _Sizes(x.shape[0], *x.shape[2:])
    (sh, sw), (oh, ow), (ph, pw) = sizes.patches, sizes.output, sizes.pool
    patches, y, out, chosen, which = _room(x, weight.dtype, sizes)
    numbers = sizes.patch_numbers - 64
    _patches[(triton.cdiv(numbers, 1024),)](
        x, patches, sizes.n, *x.stride(), sizes.h, sizes.w, sh, sw, 1024, num_warps=4
    )
    pixels = sizes.n * oh * ow
    rows, warps, programs = _CONVOLUTION
    programs = min(programs, triton.cdiv(pixels, rows))
    partial = torch.empty(programs, 2, 64, dtype=torch.float32, device=x.device)
    shape: Any = (pixels, programs, sh, sw, oh, ow)
    # One stage: with Triton's default of three the blocks take more shared memory than there is.
    _convolve[(programs,)](patches, weight, mean, y, partial, *shape, rows, num_warps=warps, num_stages=1)
    stats = norm.finish_statistics(partial, gain, bias, mean, var, pixels, momentum, eps)
    rows, warps, _ = _POOL
    maxima = sizes.n * ph * pw
    _pool[(triton.cdiv(maxima, rows),)](y, stats, out, chosen, which, maxima, oh, ow, ph, pw, rows, num_warps=warps)
    return [out, patches, y, chosen, which, stats]


@stem.register_fake
def _(
    x: Tensor, weight: Tensor, gain: Tensor, bias: Tensor, mean: Tensor, var: Tensor, momentum: float, eps: float
) -> list[Tensor]:
    patches, y, out, chosen, which = _room(x, weight.dtype, _Sizes(x.shape[0], *x.shape[2:]))
    return [out, patches, y, chosen, which, mean.new_empty(6, 64, dtype=torch.float32)]


def _room(x: Tensor, dtype: torch.dtype, sizes: _Sizes) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Empty tensors for patches, output, maxima, chosen, which."""

    def pixels(size: tuple[int, int]) -> Tensor:
        options: Any = {"device": x.device, "dtype": dtype, "memory_format": torch.channels_last}
        return torch.empty((sizes.n, 64, *size), **options)

    out = pixels(sizes.pool)
    patches = torch.empty(sizes.patch_numbers, device=x.device, dtype=dtype)
    return patches, pixels(sizes.output), out, torch.empty_like(out), torch.empty_like(out, dtype=torch.int8)


@torch.library.custom_op("hotloop::stem_backward", mutates_args=())
def stem_backward(
    dy: Tensor, dy2: Tensor | None, patches: Tensor, y: Tensor, chosen: Tensor, which: Tensor, stats: Tensor,
    height: int, width: int,
) -> list[Tensor]:  # fmt: skip
    """Gradient of the arranged weight, and coefficients."""
    sizes = _Sizes(y.shape[0], height, width)
    (sh, sw), (oh, ow), (ph, pw) = sizes.patches, sizes.output, sizes.pool
    pixels = sizes.n * oh * ow
    dy = norm.channels_last(dy)
    dy2 = None if dy2 is None else norm.channels_last(dy2)
    g, coefficients, _ = norm.gradient(dy, dy2, chosen, None, stats, None, None, 1, True, pixels)
    rows, warps, programs = _WEIGHT
    programs = min(programs, triton.cdiv(pixels, rows))
    partial = torch.empty(programs, 4, 64, 64, dtype=torch.float32, device=y.device)
    shape: Any = (pixels, programs, sh, sw, oh, ow, ph, pw)
    grid = (programs,)
    _weight_gradient[grid](patches, y, g, which, coefficients, partial, *shape, rows, num_warps=warps, num_stages=1)
    return [partial.sum(0), coefficients]


@stem_backward.register_fake
def _(
    dy: Tensor, dy2: Tensor | None, patches: Tensor, y: Tensor, chosen: Tensor, which: Tensor, stats: Tensor,
    height: int, width: int,
) -> list[Tensor]:  # fmt: skip
    return [stats.new_empty(4, 64, 64, dtype=torch.float32), stats.new_empty(5, 64, dtype=torch.float32)]


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.size, ctx.dtype = inputs[0].shape[2:], inputs[1].dtype


def _gradients(ctx: Any, grads: list[Tensor]) -> tuple[Tensor | None, ...]:
    patches, y, chosen, which, stats = ctx.saved_tensors
    height, width = ctx.size
    found = torch.ops.hotloop.stem_backward(grads[0], None, patches, y, chosen, which, stats, height, width)
    d_weight, coefficients = found
    d_gain, d_bias = coefficients[norm.D_WEIGHT], coefficients[norm.D_BIAS]
    return None, d_weight.to(ctx.dtype), d_gain, d_bias, None, None, None, None


stem.register_autograd(_gradients, setup_context=_setup)


OPERATORS = [torch.ops.hotloop.stem.default, torch.ops.hotloop.stem_backward.default]
