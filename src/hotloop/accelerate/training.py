"""What is known about a script's training, and what every acceleration looks like."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from hotloop.accelerate.plan import Plan
from hotloop.accelerate.ranks import Ranks

_OF_HOOKS = r"Using `torch\.compile\(module\)` when there are global hooks"
"""What torch warns of where a compiled module is called meanwhile."""


@dataclass
class Training:
    """A script's training.

    Attributes:
        device: of what is trained.
        optimizer: that steps; None where weights are updated by hand.
        models: modules with weights that the script itself calls, unwrapped from data parallelism over one device.
        has_autocast: whether the script calls them under autocast of its own.
        data_parallel: whether it calls one that is in DataParallel over several devices.
        waits: share of a step in which it waited for batches, as last measured.
        must_help: whether what was switched on last is only kept if steps are shorter with it.
    """

    plan: Plan
    ranks: Ranks
    device: torch.device
    optimizer: torch.optim.Optimizer | None
    models: list[nn.Module] = field(default_factory=list)
    has_autocast: bool = False
    data_parallel: bool = False
    waits: float = 0.0
    must_help: bool = False

    @property
    def processors(self) -> int:
        """That each rank of this machine may use."""
        return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


class Switch(Protocol):
    """Something that makes a training faster and can be taken back.

    Attributes:
        name: of it, as in `plan.KINDS`.
        count: how often it has acted.
    """

    name: str

    @property
    def count(self) -> int: ...

    def unfit(self, training: Training) -> str:
        """Why it has nothing to do here; empty if it has."""

    def switch_on(self, training: Training) -> None:
        """Between two steps."""

    def switch_off(self) -> None:
        """Between two steps; all is as it was."""


@contextmanager
def models_seen(training: Training) -> Iterator[None]:
    """Note which modules the script calls with gradients meanwhile."""
    depth, found = 0, training.models

    def enter(module: nn.Module, args: Any) -> None:
        nonlocal depth
        depth += 1
        if depth == 1 and torch.is_grad_enabled() and module.training:
            training.has_autocast |= torch.is_autocast_enabled(training.device.type)
            training.data_parallel |= isinstance(module, nn.DataParallel) and len(module.device_ids) > 1
            model = _unwrapped(module)
            if not any(model is known for known in found) and next(model.parameters(), None) is not None:
                found.append(model)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal depth
        depth -= 1

    hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
    # The hooks are none of the script's, which may make errors of warnings.
    warnings.filterwarnings("ignore", _OF_HOOKS, UserWarning)
    ignored, filters = warnings.filters[0], cast(list[Any], warnings.filters)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        with suppress(ValueError):  # the script has set its own filters meanwhile
            filters.remove(ignored)


def _unwrapped(module: nn.Module) -> nn.Module:
    alone = isinstance(module, nn.DataParallel) and len(module.device_ids) <= 1
    if alone or isinstance(module, nn.parallel.DistributedDataParallel):
        return cast(nn.Module, module.module)
    return module
