"""What a training step takes, and refuses."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hotloop.core.errors import HotloopError, InputError

Loss = Callable[[nn.Module, Any], Tensor]
"""(model, batch) -> mean loss over the batch, a scalar."""


def check_parts(model: nn.Module, optimizer: Optimizer, precision: str) -> None:
    """Refuse what no step can be made of.

    Raises:
        InputError: the optimizer is none, or LBFGS, or has none of the model's weights; nothing of the model
            multiplies in the float8 that is asked for; or it is not on the current device.
    """
    if not isinstance(optimizer, Optimizer):
        kind = optimizer.__name__ if isinstance(optimizer, type) else f"a {type(optimizer).__name__}"
        raise InputError(f"the optimizer is {kind}", "a step needs a torch.optim.Optimizer", "make one of the weights")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InputError("the optimizer is LBFGS", "it computes the loss several times a step", "torch.optim.AdamW")
    name = type(optimizer).__name__
    weights = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in weights for group in optimizer.param_groups for parameter in group["params"]):
        raise InputError(
            f"the optimizer, {name}, has none of the model's weights",
            "nothing of the model would learn",
            f"make it of this model's: {name}(model.parameters(), ...)",
        )
    if precision == "float8" and not any(type(each).__name__.endswith("Float8Linear") for each in model.modules()):
        raise InputError(
            'precision = "float8", and no layer of the model multiplies in float8',
            "its linear layers are as they were",
            "hotloop.train.precision.use_float8(model) before",
        )
    _check_device(next(model.parameters()).device)


def _check_device(device: torch.device) -> None:
    """Work on another one than the current would be queued there, and nothing would wait for it."""
    if device.type == "cuda" and torch.cuda.current_device() != device.index:
        raise InputError(
            f"the model is on {device}, the current device is cuda:{torch.cuda.current_device()}",
            "a step is queued on the current device",
            f"torch.cuda.set_device({device.index}) before",
        )


def check_scalar(loss: Any) -> None:
    """Refuse a loss that is not a tensor of one value, or that no weight leads to.

    Raises:
        HotloopError: it is something else.
    """
    if not isinstance(loss, Tensor) or loss.ndim:
        kind = f"has shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"is a {type(loss).__name__}"
        raise HotloopError(f"the loss {kind}", "a step needs a tensor of one value", "return its mean: loss.mean()")
    if loss.is_complex():
        raise HotloopError("the loss is complex", "there is no least one", "return a real one: loss.abs(), say")
    if not loss.requires_grad:
        raise HotloopError(
            "the loss has no gradient",
            "no weight that learns leads to it: all are frozen, or it was detached on the way",
            "requires_grad_(True) for weights; no .item(), .detach(), .long() or torch.no_grad() before the loss",
        )
