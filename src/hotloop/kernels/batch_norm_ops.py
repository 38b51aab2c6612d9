"""The operators of `batch_norm`, as the compiler and autograd see them.

- `bn_relu`: relu(bn(x)), or bn(x) alone.
- `bn_add_relu`: relu(bn(x) + shortcut).
- `bn_add_bn_relu`: relu(bn(x) + bn(shortcut)), the first block of a stage.

The gradient of an output that is used twice can be given in two parts, `dy` and `dy2`: `fold_sums` puts the sum of both
into the operator, where it costs no pass of its own.
"""

from typing import Any

import torch
from torch import Tensor, fx

from hotloop.kernels import batch_norm as kernels
from hotloop.kernels import batch_norm_cooperative as cooperative

_Grads = tuple[Tensor | None, ...]


@torch.library.custom_op("hotloop::bn", mutates_args=())
def bn(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, momentum: float, eps: float,
    shortcut: Tensor | None, relu: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """relu(bn(x) + shortcut), channels last, and the statistics."""
    check_shapes(x, shortcut)
    x = kernels.channels_last(x)
    added = None if shortcut is None else kernels.channels_last(shortcut)
    if cooperative.suits(x):
        return cooperative.forward(x, weight, bias, mean, var, momentum, eps, added, None, relu)
    stats = kernels.statistics(x, weight, bias, mean, var, momentum, eps)
    return kernels.normalise(x, stats, added, None, relu), stats


@bn.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, momentum: float, eps: float,
    shortcut: Tensor | None, relu: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _like(x), _rows(x, 6)


@torch.library.custom_op("hotloop::bn_backward", mutates_args=())
def bn_backward(
    dy: Tensor, dy2: Tensor | None, x: Tensor, out: Tensor | None, stats: Tensor, relu: bool
) -> list[Tensor]:
    """Gradient of x, coefficients, and with a shortcut (`out` is given) the gradient of that too."""
    dy, x = kernels.channels_last(dy), kernels.channels_last(x)
    dy2 = None if dy2 is None else kernels.channels_last(dy2)
    with_shortcut = out is not None
    keep = with_shortcut or dy2 is not None
    mask = 2 if with_shortcut else 1 if relu else 0
    if cooperative.suits(x):
        dx, coefficients, g = cooperative.backward(dy, dy2, x, out, stats, mask, keep)
    else:
        g, coefficients, _ = kernels.gradient(dy, dy2, x, out, stats, None, None, mask, keep)
        dx, _ = kernels.input_gradient(g, x, stats, coefficients, None, coefficients, 0 if keep else mask)
    return [dx, coefficients, g] if with_shortcut else [dx, coefficients]


@bn_backward.register_fake
def _(dy: Tensor, dy2: Tensor | None, x: Tensor, out: Tensor | None, stats: Tensor, relu: bool) -> list[Tensor]:
    return [_like(x), _rows(x, 5), *([] if out is None else [_like(x)])]


def _bn_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.with_shortcut, ctx.relu = inputs[7] is not None, inputs[8]
    ctx.save_for_backward(inputs[0], output[1], *([output[0]] if ctx.with_shortcut else []))


def _bn_gradients(ctx: Any, dy: Tensor, _: Tensor) -> _Grads:
    x, stats, *out = ctx.saved_tensors
    found = torch.ops.hotloop.bn_backward(dy, None, x, out[0] if out else None, stats, ctx.relu)
    coefficients = found[1]
    d_shortcut = found[2] if ctx.with_shortcut else None
    return (
        found[0],
        coefficients[kernels.D_WEIGHT],
        coefficients[kernels.D_BIAS],
        None,
        None,
        None,
        None,
        d_shortcut,
        None,
    )


bn.register_autograd(_bn_gradients, setup_context=_bn_setup)


@torch.library.custom_op("hotloop::bn_add_bn", mutates_args=())
def bn_add_bn(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, momentum: float, eps: float,
    x2: Tensor, weight2: Tensor, bias2: Tensor, mean2: Tensor, var2: Tensor, momentum2: float, eps2: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """relu(bn(x) + bn(x2)), channels last, and both statistics."""
    check_shapes(x, x2)
    x, x2 = kernels.channels_last(x), kernels.channels_last(x2)
    stats2 = kernels.statistics(x2, weight2, bias2, mean2, var2, momentum2, eps2)
    if cooperative.suits(x):
        out, stats = cooperative.forward(x, weight, bias, mean, var, momentum, eps, x2, stats2, True)
        return out, stats, stats2
    stats = kernels.statistics(x, weight, bias, mean, var, momentum, eps)
    return kernels.normalise(x, stats, x2, stats2, True), stats, stats2


@bn_add_bn.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, momentum: float, eps: float,
    x2: Tensor, weight2: Tensor, bias2: Tensor, mean2: Tensor, var2: Tensor, momentum2: float, eps2: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _like(x), _rows(x, 6), _rows(x, 6)


@torch.library.custom_op("hotloop::bn_add_bn_backward", mutates_args=())
def bn_add_bn_backward(
    dy: Tensor, dy2: Tensor | None, x: Tensor, out: Tensor, stats: Tensor, x2: Tensor, stats2: Tensor
) -> list[Tensor]:
    """Gradients of x and x2, each with its coefficients."""
    dy, x, x2 = (kernels.channels_last(tensor) for tensor in (dy, x, x2))
    dy2 = None if dy2 is None else kernels.channels_last(dy2)
    g, coefficients, coefficients2 = kernels.gradient(dy, dy2, x, out, stats, x2, stats2, 2, True)
    dx, dx2 = kernels.input_gradient(g, x, stats, coefficients, x2, coefficients2, 0)
    return [dx, coefficients, dx2, coefficients2]


@bn_add_bn_backward.register_fake
def _(
    dy: Tensor, dy2: Tensor | None, x: Tensor, out: Tensor, stats: Tensor, x2: Tensor, stats2: Tensor
) -> list[Tensor]:
    return [_like(x), _rows(x, 5), _like(x), _rows(x, 5)]


def _two_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0], output[0], output[1], inputs[7], output[2])


def _two_gradients(ctx: Any, dy: Tensor, *_: Tensor) -> _Grads:
    x, out, stats, x2, stats2 = ctx.saved_tensors
    dx, one, dx2, two = torch.ops.hotloop.bn_add_bn_backward(dy, None, x, out, stats, x2, stats2)
    first = (dx, one[kernels.D_WEIGHT], one[kernels.D_BIAS], None, None, None, None)
    return (*first, dx2, two[kernels.D_WEIGHT], two[kernels.D_BIAS], None, None, None, None)


bn_add_bn.register_autograd(_two_gradients, setup_context=_two_setup)


OPERATORS = [
    torch.ops.hotloop.bn.default,
    torch.ops.hotloop.bn_backward.default,
    torch.ops.hotloop.bn_add_bn.default,
    torch.ops.hotloop.bn_add_bn_backward.default,
]


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.channels_last)


def check_shapes(x: Tensor, other: Tensor | None) -> None:
    """The kernels read both as one.

    Raises:
        ValueError: they have different shapes.
    """
    if other is not None and other.shape != x.shape:
        raise ValueError(f"x has shape {tuple(x.shape)}, what is added to it {tuple(other.shape)}")


def _rows(x: Tensor, count: int) -> Tensor:
    return x.new_empty(count, x.shape[1], dtype=torch.float32)


def _has_shape_of(total: fx.Node, part: Any) -> bool:
    return isinstance(part, fx.Node) and part.meta["val"].shape == total.meta["val"].shape


def fold_sums(graph: fx.Graph) -> None:
    """Where a backward operator is given the sum of two gradients, give it both: the sum then costs no pass.

    A pass over the compiler's graph, after it has laid out the backward part.
    """
    operators = {
        torch.ops.hotloop.bn_backward.default,
        torch.ops.hotloop.bn_add_bn_backward.default,
        torch.ops.hotloop.stem_backward.default,
    }
    nodes: list[Any] = list(graph.nodes)
    for node in nodes:
        if node.op != "call_function" or node.target not in operators or node.args[1] is not None:
            continue
        total: Any = node.args[0]
        is_sum = isinstance(total, fx.Node) and total.target is torch.ops.aten.add.Tensor and not total.kwargs
        if is_sum and len(total.users) == 1 and all(_has_shape_of(total, part) for part in total.args):
            node.args = (*total.args, *node.args[2:])
            graph.erase_node(total)
