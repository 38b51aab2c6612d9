"""What a training step refuses."""

from typing import Any

import torch
from torch import Tensor

from hotloop.core.errors import HotloopError, InputError


def check_device(device: torch.device) -> None:
    """Refuse a model that is not on the current device.

    Raises:
        InputError: its work would be queued on another one, and nothing would wait for it.
    """
    if device.type == "cuda" and torch.cuda.current_device() != device.index:
        raise InputError(
            f"the model is on {device}, the current device is cuda:{torch.cuda.current_device()}",
            "a step is queued on the current device",
            f"torch.cuda.set_device({device.index}) before",
        )


def check_scalar(loss: Any) -> None:
    """Refuse a loss that is not a tensor of one value.

    Raises:
        HotloopError: it is something else.
    """
    if not isinstance(loss, Tensor) or loss.ndim:
        kind = f"has shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"is a {type(loss).__name__}"
        raise HotloopError(f"the loss {kind}", "a step needs a tensor of one value", "return its mean: loss.mean()")
