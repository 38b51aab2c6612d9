"""Put our operators into a model: a second way through the same layers, for training on a GPU."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.nn import functional

from hotloop.kernels import batch_norm, batch_norm_ops, convolution, stem
from hotloop.kernels.batch_norm_ops import fold_sums
from hotloop.kernels.convolution import search_algorithms, split_gradients
from hotloop.kernels.stem import arranged_weight
from hotloop.kernels.trace import trace

_RELUS = (functional.relu, torch.relu)
_SUMS = (operator.add, operator.iadd, torch.add)


def fused(model: nn.Module, dtype: torch.dtype) -> Callable[..., Any] | None:
    """The model's forward pass in training, its convolutions' surroundings in fewer passes over memory.

    Batch normalisations with what follows them (a sum, a ReLU), and the beginning of ResNets, become operators of ours.
    Weights and buffers are the model's own. The numbers are the same to rounding.

    Args:
        dtype: what the convolutions compute in.

    Returns:
        None if there is nothing to fuse, or the model cannot be traced for sure.
    """
    traced = trace(model)
    if traced is None:
        return None
    found = _fuse_stems(traced, dtype) + _fuse_norms(traced, dtype)
    if not found:
        return None
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return traced


def announce_to_compiler() -> None:
    """Tell torch.compile that our operators are calls as they stand.

    Of an operator that it was not told of it writes down all inputs for a log message, whether that is shown or not:
    minutes for a deep network (`GraphLowering.call_function`, torch 2.11).
    """
    from torch._inductor.lowering import lowerings, make_fallback, tag_to_layout_constraint
    from torch._library.utils import get_layout_constraint_tag

    for ours in batch_norm_ops.OPERATORS + convolution.OPERATORS + stem.OPERATORS:
        if ours not in lowerings:
            make_fallback(ours, tag_to_layout_constraint(get_layout_constraint_tag(ours)), warn=False)


class Passes(CustomGraphPass):
    """Our passes over the compiler's graph; its cache knows them by this name."""

    def __call__(self, graph: fx.Graph) -> None:
        fold_sums(graph)
        search_algorithms(graph)
        split_gradients(graph)

    def uuid(self) -> Any:
        return b"hotloop passes 3"


class _Norm(nn.Module):
    """relu(bn(x) + shortcut)."""

    def __init__(self, norm: nn.BatchNorm2d, relu: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm, self.relu, self.dtype = norm, relu, dtype

    def forward(self, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
        if not _fits(x, shortcut):
            y = self.norm(x) if shortcut is None else self.norm(x) + shortcut
            return functional.relu(y) if self.relu else y
        arguments = (x.to(self.dtype), *_numbers(self.norm), shortcut, self.relu)
        out, stats = torch.ops.hotloop.bn(*arguments)
        _keep(self.norm, stats)
        result: Tensor = out
        return result


class _TwoNorms(nn.Module):
    """relu(bn(x) + bn2(y))."""

    def __init__(self, norm: nn.BatchNorm2d, norm2: nn.BatchNorm2d, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm, self.norm2, self.dtype = norm, norm2, dtype

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if not _fits(x, y):
            return functional.relu(self.norm(x) + self.norm2(y))
        first = (x.to(self.dtype), *_numbers(self.norm))
        out, stats, stats2 = torch.ops.hotloop.bn_add_bn(*first, y.to(self.dtype), *_numbers(self.norm2))
        _keep(self.norm, stats)
        _keep(self.norm2, stats2)
        result: Tensor = out
        return result


class _Stem(nn.Module):
    """Convolution, normalisation, ReLU and maximum."""

    def __init__(self, conv: nn.Conv2d, norm: nn.BatchNorm2d, pool: nn.MaxPool2d, dtype: torch.dtype) -> None:
        super().__init__()
        self.conv, self.norm, self.pool, self.dtype = conv, norm, pool, dtype

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad or not x.numel():  # the operator has no gradient for it
            plain: Tensor = self.pool(functional.relu(self.norm(self.conv(x))))
            return plain
        weight = arranged_weight(self.conv.weight).to(self.dtype)
        out, *_, stats = torch.ops.hotloop.stem(x, weight, *_numbers(self.norm))
        _keep(self.norm, stats)
        result: Tensor = out
        return result


def _fits(x: Tensor, other: Tensor | None) -> bool:
    """Whether the operators take it: more than one pixel a channel, and what is added has its shape."""
    return x.ndim == 4 and x.numel() > x.shape[1] and (other is None or other.shape == x.shape)


def _numbers(norm: nn.BatchNorm2d) -> tuple[Any, ...]:
    return norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.momentum, norm.eps


@torch.no_grad()
def _keep(norm: nn.BatchNorm2d, stats: Tensor) -> None:
    """The running values after this batch."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.num_batches_tracked is not None
    norm.running_mean.copy_(stats[batch_norm.NEW_MEAN])
    norm.running_var.copy_(stats[batch_norm.NEW_VAR])
    norm.num_batches_tracked.add_(1)


def _fuse_stems(traced: fx.GraphModule, dtype: torch.dtype) -> int:
    modules: dict[str, Any] = dict(traced.named_modules())
    count = 0
    nodes: list[Any] = list(traced.graph.nodes)
    for pool in nodes:
        relu: Any = _only_input(pool) if _module(pool, modules, nn.MaxPool2d) else None
        norm: Any = _only_input(relu) if relu and _is_relu(relu, modules) else None
        conv: Any = _only_input(norm) if norm and _plain_norm(norm, modules) else None
        if conv and _module(conv, modules, nn.Conv2d) and _is_stem(modules[conv.target], modules[pool.target]):
            fused = _Stem(modules[conv.target], modules[norm.target], modules[pool.target], dtype)
            _replace(traced, pool, fused, (conv.args[0],), f"fused_stem_{count}")
            count += 1
    return count


def _fuse_norms(traced: fx.GraphModule, dtype: torch.dtype) -> int:
    modules: dict[str, Any] = dict(traced.named_modules())
    count = 0
    relus: list[Any] = [node for node in traced.graph.nodes if _is_relu(node, modules)]
    for relu in relus:
        source = _only_input(relu)
        if source is None:
            continue
        arguments: tuple[Any, ...]
        if _plain_norm(source, modules):
            fused: nn.Module = _Norm(modules[source.target], True, dtype)
            arguments = (source.args[0],)
        elif source.op == "call_function" and source.target in _SUMS and not source.kwargs:
            normed: list[Any] = [part for part in source.args if _plain_norm(part, modules) and len(part.users) == 1]
            if not normed:
                continue
            first = normed[0]
            if len(normed) == 2:
                fused = _TwoNorms(modules[first.target], modules[normed[1].target], dtype)
                arguments = (first.args[0], normed[1].args[0])
            else:
                shortcut = source.args[1] if source.args[0] is first else source.args[0]
                if not isinstance(shortcut, fx.Node):
                    continue
                fused = _Norm(modules[first.target], True, dtype)
                arguments = (first.args[0], shortcut)
        else:
            continue
        _replace(traced, relu, fused, arguments, f"fused_norm_{count}")
        count += 1
    return count


def _replace(traced: fx.GraphModule, node: fx.Node, module: nn.Module, arguments: tuple[Any, ...], name: str) -> None:
    traced.add_module(name, module)
    with traced.graph.inserting_before(node):
        new = traced.graph.call_module(name, arguments)
    node.replace_all_uses_with(new)
    traced.graph.erase_node(node)
    traced.graph.eliminate_dead_code()


def _module(node: Any, modules: dict[str, Any], kind: type[nn.Module]) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_module" and type(modules.get(str(node.target))) is kind


def _plain_norm(node: Any, modules: dict[str, Any]) -> bool:
    """A batch normalisation with weights and running values, of channels that the blocks fit."""
    if not _module(node, modules, nn.BatchNorm2d):
        return False
    norm: Any = modules[node.target]
    return (
        norm.affine and norm.track_running_stats and norm.momentum is not None and batch_norm.suits(norm.num_features)
    )


def _is_relu(node: Any, modules: dict[str, Any]) -> bool:
    return _module(node, modules, nn.ReLU) or (node.op == "call_function" and node.target in _RELUS)


def _only_input(node: Any) -> Any:
    """What the node reads, if nobody else does."""
    source: Any = node.args[0] if node.args else None
    return source if isinstance(source, fx.Node) and len(source.users) == 1 else None


def _is_stem(conv: Any, pool: Any) -> bool:
    shape = tuple(conv.weight.shape) == (64, 3, 7, 7) and conv.bias is None
    steps = (conv.stride, conv.padding, conv.dilation, conv.groups) == ((2, 2), (3, 3), (1, 1), 1)
    pools = (pool.kernel_size, pool.stride, pool.padding, pool.dilation, pool.ceil_mode) == (3, 2, 1, 1, False)
    return shape and steps and pools and not pool.return_indices and conv.padding_mode == "zeros"
