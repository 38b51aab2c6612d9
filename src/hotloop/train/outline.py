"""Models that are divided before they have numbers: the first rank alone makes them whole, in its host's memory."""

import copy
import gc
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from hotloop.tasks.task import Task
from hotloop.train.random_state import untouched_generators


def outline(task: Task, make: Callable[[Task], nn.Module]) -> nn.Module | None:
    """A task's model without numbers, on torch's "meta" device; None if it cannot be made so.

    Nothing is drawn from random numbers. What the task keeps of it, it keeps.

    Args:
        make: makes the model of the task that it is given.
    """
    trial, before = copy.copy(task), _without_numbers()
    try:
        with untouched_generators(), torch.device("meta"):
            model = make(trial)
    except Exception:  # one that computes with numbers; what is wrong with it is said when it is made with them
        return None
    if not _without_numbers() <= before | {id(tensor) for _, tensor in _named_tensors(model)}:  # it keeps others aside
        return None
    vars(task).update(vars(trial))
    return model


def is_outline(model: nn.Module) -> bool:
    """Whether it has no numbers yet."""
    return any(parameter.is_meta for parameter in model.parameters())


def fill(model: nn.Module, whole: nn.Module | None, device: str) -> None:
    """Give a divided outline its memory, and the first rank's numbers. All ranks call it.

    One tensor at a time is whole on each device.

    Args:
        whole: the same model, not divided, on the first rank; None on the others.
    """
    given = dict(_named_tensors(whole)) if whole else {}
    names = {tensor: name for name, tensor in _named_tensors(model)}
    filled = {own: _received(own, given.get(name), device) for own, name in names.items()}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            held.update({name: filled[own] for name, own in held.items() if own is not None})


def _received(own: Tensor, given: Tensor | None, device: str) -> Any:
    """What a rank has of a tensor of the first one's."""
    full = torch.empty(own.shape, dtype=own.dtype, device=device)
    if given is not None:
        full.copy_(given.detach())
    distributed.broadcast(full, src=0)
    if isinstance(own, DTensor):
        full = distribute_tensor(full, own.device_mesh, own.placements, src_data_rank=None)
    return nn.Parameter(full, own.requires_grad) if isinstance(own, nn.Parameter) else full


def _named_tensors(model: nn.Module) -> chain[tuple[str, Tensor]]:
    return chain(model.named_parameters(), model.named_buffers())


def _without_numbers() -> set[int]:
    """All tensors that have none, wherever they are kept. Takes 0.2 s."""
    gc.collect()
    return {id(each) for each in gc.get_objects() if issubclass(type(each), Tensor) and each.is_meta}
