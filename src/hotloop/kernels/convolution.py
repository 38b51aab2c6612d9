"""The two gradients of a convolution side by side.

Those of small images leave most of the device idle. Neither needs the other, so they run on two streams; in a captured
step they become two branches of the graph.
"""

import functools
from typing import Any

import torch
from torch import Tensor, fx

_Sizes = list[int]

_LARGEST_BYTES = 16 * 2**20
"""Of a convolution's input. A ResNet-18's step for images of 32 pixels takes 0.95 of its time with two streams, a
ResNet-50's 0.98, but 1.01 with 224 pixels, whose convolutions fill an H200 by themselves."""


@torch.library.custom_op("hotloop::convolution_backward", mutates_args=())
def convolution_backward(
    dy: Tensor, x: Tensor, weight: Tensor, stride: _Sizes, padding: _Sizes, dilation: _Sizes, groups: int
) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight."""
    current, side = torch.cuda.current_stream(x.device), _side_stream(x.device.index)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        d_weight = _plain(dy, x, weight, stride, padding, dilation, groups, [False, True, False])[1]
    dx = _plain(dy, x, weight, stride, padding, dilation, groups, [True, False, False])[0]
    current.wait_stream(side)
    return dx, d_weight


@convolution_backward.register_fake
def _(
    dy: Tensor, x: Tensor, weight: Tensor, stride: _Sizes, padding: _Sizes, dilation: _Sizes, groups: int
) -> tuple[Tensor, Tensor]:
    dx, d_weight, _ = _plain(dy, x, weight, stride, padding, dilation, groups, [True, True, False])
    return dx, d_weight


def _plain(
    dy: Tensor, x: Tensor, weight: Tensor, stride: _Sizes, padding: _Sizes, dilation: _Sizes, groups: int,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    zeros = [0] * len(stride)
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(
        dy, x, weight, None, stride, padding, dilation, False, zeros, groups, wanted
    )
    return found


@functools.cache
def _side_stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


OPERATORS = [torch.ops.hotloop.convolution_backward.default]


def split_gradients(graph: fx.Graph) -> None:
    """Let `convolution_backward` take the place of torch's where both gradients of a small input are wanted.

    A pass over the compiler's graph, after it has laid out the backward part.
    """
    nodes: list[Any] = list(graph.nodes)
    for node in nodes:
        if node.target is not torch.ops.aten.convolution_backward.default:
            continue
        dy, x, weight, _, stride, padding, dilation, transposed, _, groups, wanted = node.args
        given: Tensor = x.meta["val"]
        large = given.numel() * given.element_size() > _LARGEST_BYTES
        if transposed or large or list(wanted) != [True, True, False]:
            continue
        node.target = OPERATORS[0]
        node.args = (dy, x, weight, stride, padding, dilation, groups)
        node.meta["val"] = tuple(node.meta["val"])[:2]
