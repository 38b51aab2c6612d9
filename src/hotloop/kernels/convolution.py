"""Convolutions by the faster of cuDNN's algorithms, and the two gradients of small ones side by side.

Gradients of small images leave most of the device idle. Neither needs the other, so they run on two streams; in a
captured step they become two branches of the graph.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from hotloop.kernels.search import searched

_Sizes = list[int]

_LARGEST_BYTES = 16 * 2**20
"""Of a convolution's input. A ResNet-18's step for images of 32 pixels takes 0.95 of its time with two streams, a
ResNet-50's 0.98, but 1.01 with 224 pixels, whose convolutions fill an H200 by themselves."""


# Else the layouts with which the passes below put them into a graph would not be kept (`GraphLowering.run_node`).
_operator = functools.partial(torch.library.custom_op, mutates_args=(), tags=(torch.Tag.needs_fixed_stride_order,))


@_operator("hotloop::convolution")
def convolve(x: Tensor, weight: Tensor, stride: _Sizes, padding: _Sizes, dilation: _Sizes, groups: int) -> Tensor:
    """(B, C, H, W) and (K, C / groups, R, S) to (B, K, P, Q)."""
    run = functools.partial(_forward, x, weight, stride, padding, dilation, groups)
    found: Tensor = _in_the_faster_way(run, x, weight, stride, padding, dilation, groups)
    return found


@convolve.register_fake
def _forward(x: Tensor, weight: Tensor, stride: _Sizes, padding: _Sizes, dilation: _Sizes, groups: int) -> Tensor:
    found: Tensor = torch.ops.aten.convolution(
        x, weight, None, stride, padding, dilation, False, [0] * len(stride), groups
    )
    return found


@_operator("hotloop::convolution_backward")
def convolution_backward(
    dy: Tensor, x: Tensor, weight: Tensor, stride: _Sizes, padding: _Sizes, dilation: _Sizes, groups: int
) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight."""

    def gradient(of: int) -> Tensor:
        wanted = [of == 0, of == 1, False]
        run = functools.partial(_backward, dy, x, weight, stride, padding, dilation, groups, wanted)
        found: tuple[Tensor, ...] = _in_the_faster_way(run, x, weight, stride, padding, dilation, groups, wanted)
        return found[of]

    if _is_large(x):
        return gradient(0), gradient(1)
    current, side = torch.cuda.current_stream(x.device), _side_stream(x.device.index)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        d_weight = gradient(1)
    dx = gradient(0)
    current.wait_stream(side)
    return dx, d_weight


@convolution_backward.register_fake
def _(
    dy: Tensor, x: Tensor, weight: Tensor, stride: _Sizes, padding: _Sizes, dilation: _Sizes, groups: int
) -> tuple[Tensor, Tensor]:
    dx, d_weight, _ = _backward(dy, x, weight, stride, padding, dilation, groups, [True, True, False])
    return dx, d_weight


def _backward(
    dy: Tensor, x: Tensor, weight: Tensor, stride: _Sizes, padding: _Sizes, dilation: _Sizes, groups: int,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(
        dy, x, weight, None, stride, padding, dilation, False, [0] * len(stride), groups, wanted
    )
    return found


def _in_the_faster_way(run: functools.partial[Any], x: Tensor, weight: Tensor, *settings: Sequence[int] | int) -> Any:
    if not x.is_cuda or not _is_searched(x, weight):
        return run()
    told = (tuple(one) if isinstance(one, Sequence) else one for one in settings)
    return searched(run, (run.func, x.device.index, x.dtype, x.shape, weight.shape, *told))


def _is_searched(x: Tensor, weight: Tensor) -> bool:
    """Whether another way can be kept for it, and the compiler would not arrange it better."""
    last = all(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in (x, weight))
    return last and x.element_size() == 2


def _is_large(x: Tensor) -> bool:
    return x.numel() * x.element_size() > _LARGEST_BYTES


@functools.cache
def _side_stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


_CONVOLUTION, _BACKWARD = torch.ops.hotloop.convolution.default, torch.ops.hotloop.convolution_backward.default
OPERATORS = [_CONVOLUTION, _BACKWARD]


def search_algorithms(graph: fx.Graph) -> None:
    """Let `convolve` take the place of torch's, where the faster of two ways can be kept.

    A pass over the compiler's graph, after it has laid out the backward part.
    """
    for node in _calls(graph, torch.ops.aten.convolution.default):
        x, weight, bias, stride, padding, dilation, transposed, _, groups = node.args
        if not transposed and bias is None and _is_searched(x.meta["val"], weight.meta["val"]):
            node.target = _CONVOLUTION
            node.args = (x, weight, stride, padding, dilation, groups)


def split_gradients(graph: fx.Graph) -> None:
    """Let `convolution_backward` take the place of torch's where both gradients are wanted, of a small input or one
    whose faster way can be kept.

    A pass as `search_algorithms`.
    """
    for node in _calls(graph, torch.ops.aten.convolution_backward.default):
        dy, x, weight, _, stride, padding, dilation, transposed, _, groups, wanted = node.args
        suits = not _is_large(x.meta["val"]) or _is_searched(x.meta["val"], weight.meta["val"])
        if not transposed and suits and list(wanted) == [True, True, False]:
            node.target = _BACKWARD
            node.args = (dy, x, weight, stride, padding, dilation, groups)
            node.meta["val"] = tuple(node.meta["val"])[:2]


def _calls(graph: fx.Graph, target: Any) -> list[Any]:
    return [node for node in graph.nodes if node.target is target]
