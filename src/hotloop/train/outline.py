"""Models that are divided before they have numbers: the first rank alone makes them whole, in its host's memory."""

from itertools import chain
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from hotloop.core.errors import InputError
from hotloop.tasks.task import Task
from hotloop.train.random_state import untouched_generators


def outline(task: Task) -> nn.Module:
    """The model of a task that says `model_on_meta`, without numbers. Draws nothing from random numbers."""
    with untouched_generators(), torch.device("meta"):
        return task.model()


def is_outline(model: nn.Module) -> bool:
    """Whether it has no numbers yet."""
    return any(tensor.is_meta for _, tensor in _named_tensors(model))


def fill(model: nn.Module, whole: nn.Module | None, device: str) -> None:
    """Give a divided outline its memory, and the first rank's numbers. All ranks call it.

    One tensor at a time is whole on each device.

    Args:
        whole: the same model, not divided, on the first rank; None on the others.

    Raises:
        InputError: it is another one.
    """
    given = dict(_named_tensors(whole)) if whole else {}
    outlined = dict(_named_tensors(model))
    if whole and _facts(given) != _facts(outlined):
        raise InputError(
            f"{type(whole).__name__} has other weights or buffers on torch's meta device",
            "its task says model_on_meta, and each rank's part would be of another model",
            "model_on_meta = False in the task",
        )
    filled = {own: _received(own, given.get(name), device) for name, own in outlined.items()}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            held.update({name: filled[own] for name, own in held.items() if own is not None})


def _received(own: Tensor, given: Tensor | None, device: str) -> Any:
    """What a rank has of a tensor of the first one's."""
    full = torch.empty(own.shape, dtype=own.dtype, device=device)
    if given is not None:
        full.copy_(given.detach())
    distributed.broadcast(full.view(-1).view(torch.uint8), src=0)  # gloo sends no int16
    if isinstance(own, DTensor):
        full = distribute_tensor(full, own.device_mesh, own.placements, src_data_rank=None)
    return nn.Parameter(full, own.requires_grad) if isinstance(own, nn.Parameter) else full


def _named_tensors(model: nn.Module) -> chain[tuple[str, Tensor]]:
    return chain(model.named_parameters(), model.named_buffers())


def _facts(tensors: dict[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
