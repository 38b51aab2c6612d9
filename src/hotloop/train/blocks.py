"""The repeated blocks of a model: what is compiled once and reused, and what is recomputed to save memory."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from hotloop.core.errors import InputError

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks that make up most of a model: of all classes that occur more than once, the one with most weights.

    Layers and containers do not count, nor does a block inside another of its class. Empty if nothing repeats.
    """
    found: dict[type, list[nn.Module]] = defaultdict(list)

    def visit(module: nn.Module, inside: frozenset[type]) -> None:
        kind = type(module)
        if _is_block(module) and kind not in inside and module is not model:
            found[kind].append(module)
            inside = inside | {kind}
        for child in module.children():
            visit(child, inside)

    visit(model, frozenset())
    repeated = [blocks for blocks in found.values() if len(blocks) > 1]
    return max(repeated, key=lambda blocks: sum(_weights(block) for block in blocks), default=[])


def gathered_apart(model: nn.Module) -> tuple[nn.Module, ...]:
    """Layers before and after the blocks, with weights that nothing but their own forward pass uses; a model names them
    by an attribute of this name. Ranks that divide weights gather each when its turn comes, and send its gradients as
    soon as it has them. What else is outside of blocks is gathered before the forward pass and sent after the backward
    pass, while nothing computes.
    """
    found: tuple[nn.Module, ...] = tuple(getattr(model, "gathered_apart", ()))
    return found


_FEWEST_ALIKE = 6


def are_alike(blocks: Sequence[nn.Module]) -> bool:
    """Whether some blocks tell what all of them do: they are many, with weights of the same shapes in each."""
    shapes = {tuple(parameter.shape for parameter in block.parameters()) for block in blocks}
    return len(blocks) >= _FEWEST_ALIKE and len(shapes) == 1


def skip(blocks: Iterable[nn.Module]) -> None:
    """Let blocks hand on what they are given first."""
    for block in blocks:
        block.forward = lambda x, *rest, **named: x


def _is_block(module: nn.Module) -> bool:
    with_weights = [child for child in module.children() if _weights(child)]
    return len(with_weights) > 1 and not isinstance(module, _CONTAINERS)


def _weights(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def has_batch_norm(model: nn.Module) -> bool:
    """Whether a model keeps running statistics of its batches."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


def wrap_forward(module: nn.Module, around: Callable[..., Any]) -> None:
    """Let `module(...)` be `around(forward, ...)`; names of weights, copies and type checks stay as they are."""

    def forward(self: nn.Module, *arguments: Any, **named: Any) -> Any:
        return around(partial(original.forward, self), *arguments, **named)

    original = type(module)
    if (original, around) not in _WRAPPED:  # one class for all, so that they still count as blocks of one kind
        members = {"forward": forward, "__module__": original.__module__}
        _WRAPPED[original, around] = type(original.__name__, (original,), members)
    module.__class__ = _WRAPPED[original, around]


_WRAPPED: dict[tuple[type, Callable[..., Any]], type] = {}


EXPENSIVE = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.convolution.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]
"""What "selective" keeps: what costs much to compute for the memory that it takes."""


def recomputable_blocks(model: nn.Module, how: str) -> list[nn.Module]:
    """The repeated blocks, whose activations can be computed again.

    Raises:
        InputError: there are none, or theirs cannot.
    """
    blocks = repeated_blocks(model)
    if not blocks:
        raise InputError(
            f'speed.activations = "{how}": the model has no repeated blocks',
            f"{type(model).__name__} holds no two modules of one class with weights in several layers",
            '--set speed.activations="keep"',
        )
    if any(has_batch_norm(block) for block in blocks):
        raise InputError(
            f'speed.activations = "{how}": the blocks hold batch normalisation',
            "computed twice, it would count each batch twice in its running statistics",
            '--set speed.activations="keep"',
        )
    return blocks


def recompute_activations(model: nn.Module, how: str) -> int:
    """Keep less for the backward pass, and compute it again there. The number of blocks.

    Args:
        how: "blocks" keeps the inputs of the repeated blocks alone (about a third more compute); "selective" keeps the
            results of matrix products, convolutions and attention as well (a few per cent more compute).

    Raises:
        InputError: as `recomputable_blocks`.
    """
    blocks = recomputable_blocks(model, how)
    options: dict[str, Any] = {"use_reentrant": False}
    if how == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, EXPENSIVE)
    # Remembering the state of the random numbers waits for the GPU, so that the step cannot be captured; what may draw
    # needs it, or it would draw other masks the second time.
    options["preserve_rng_state"] = any(_draws(module) for module in model.modules())

    def around(forward: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*arguments, **named)
        return checkpoint(forward, *arguments, **named, **options)

    for block in blocks:
        for module in block.modules():
            if getattr(module, "inplace", False) is True:  # it would overwrite what "selective" keeps
                module.inplace = False  # type: ignore[assignment]
        wrap_forward(block, around)
    return len(blocks)


def _draws(module: nn.Module) -> bool:
    """Whether a module may draw random numbers: code that is neither torch's nor ours may do anything."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        return module.dropout > 0
    known = type(module).__module__.startswith(("torch.nn.", "hotloop."))
    return isinstance(module, nn.RReLU) or not known


def tensors_as_float(value: Any) -> Any:
    """Floating tensors as float32; all else as it is."""
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
