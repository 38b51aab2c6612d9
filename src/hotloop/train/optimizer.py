"""Optimizers by name, and their learning rates on the device."""

from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hotloop.core.errors import HotloopError, InputError
from hotloop.core.job import OptimizerSection
from hotloop.core.objects import load_object
from hotloop.train.counter import Counter
from hotloop.train.schedule import Schedule
from hotloop.train.sharded import is_sharded

_FUSED_NAMES = ("sgd", "adam", "adamw", "adagrad")
_FUSED_SHARDED = ("adam", "adamw")
"""Of weights that are divided among ranks; torch has no rule for the others."""


def make_optimizer(section: OptimizerSection, model: nn.Module) -> Optimizer:
    """The job's optimizer over the model's trainable parameters, fused where torch has it fused.

    Vectors (biases, gains of normalisation) are not decayed unless `decay_vectors` says so: decaying them costs
    accuracy and saves nothing (He et al., "Bag of tricks", 2019).

    Raises:
        InputError: there is no such optimizer, it does not take those arguments or these weights, or none learns.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    _check_arguments(section, trainable)
    matrices = [parameter for parameter in trainable if parameter.ndim > 1 or section.decay_vectors]
    vectors = [parameter for parameter in trainable if parameter.ndim <= 1 and not section.decay_vectors]
    groups = [
        {"params": matrices, "weight_decay": section.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    arguments: dict[str, Any] = {"lr": section.learning_rate, **section.arguments}
    kind = _kind(section.name)
    if section.name in (_FUSED_SHARDED if is_sharded(model) else _FUSED_NAMES):
        arguments.setdefault("fused", True)
    try:
        optimizer: Optimizer = kind([group for group in groups if group["params"]], **arguments)
    except (TypeError, ValueError) as error:
        if not section.arguments:
            what = f'optimizer.name = "{section.name}" does not fit this model'
            raise InputError(what, str(error), '--set optimizer.name="adamw"') from error
        raise InputError(
            f"optimizer.arguments = {section.arguments} do not fit {section.name}",
            str(error),
            "--set optimizer.arguments={}",
        ) from error
    if section.weight_decay and ":" not in section.name and "weight_decay" not in optimizer.defaults:
        raise InputError(
            f"optimizer.weight_decay = {section.weight_decay:g} with {section.name}",
            f"{section.name} has no weight decay",
            "--set optimizer.weight_decay=0",
        )
    return optimizer


_OWN_KEYS = {"lr": "learning_rate", "weight_decay": "weight_decay"}
"""Arguments of optimizers that are keys of a job."""


def _check_arguments(section: OptimizerSection, trainable: list[nn.Parameter]) -> None:
    if not trainable:
        raise InputError(
            "no weight of the model learns", "all of them are frozen", "requires_grad_(True) for those that are to"
        )
    for name, key in _OWN_KEYS.items():
        if name in section.arguments:
            raise InputError(
                f"optimizer.arguments = {section.arguments}: {name} is not read there",
                f"it is optimizer.{key}",
                f"take it out, and --set optimizer.{key}={section.arguments[name]}",
            )


def _kind(name: str) -> Any:
    if ":" in name:
        return load_object(name, "optimizer.name")
    known = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer
    }
    if name not in known:
        near = get_close_matches(name, known, n=1)
        raise InputError(
            f'unknown optimizer "{name}"',
            f"the nearest name is {near[0]}" if near else f"torch.optim has {', '.join(sorted(known))}",
            f'--set optimizer.name="{near[0] if near else "sgd"}"',
        )
    return known[name]


_FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


class Rates:
    """The learning rates of an optimizer, step by step.

    On a GPU they are tensors, so that a captured step can read them: it looks them up by the step's number in a table
    that the host fills ahead. The optimizer's fused or capturable form is switched on, which keeps all of its state on
    the device.

    Args:
        optimizer: its learning rates are taken as the highest ones.
        schedule: factor of them at each step; without one they are left as they are.
        counter: of the steps.
        capture: whether steps are to be captured; otherwise the rates stay plain numbers.

    Attributes:
        obstacle: why the optimizer's step cannot be captured; empty if it can.
    """

    def __init__(self, optimizer: Optimizer, schedule: Schedule | None, counter: Counter, capture: bool) -> None:
        self._optimizer = optimizer
        self._schedule = schedule
        self._counter = counter
        self._highest = [float(group["lr"]) for group in optimizer.param_groups]
        self._factors: list[float] = []
        self._first = 0
        self._table: Tensor | None = None
        self.obstacle = _obstacle(optimizer) if capture else ""
        if capture and not self.obstacle:
            device = counter.position.device
            self._table = torch.tensor(self._highest, device=device).repeat(Counter.CAPACITY, 1)
            self._row = self._table[:1].clone()
            self._bind()

    def load_optimizer(self, state: dict[str, Any]) -> None:
        """Load what the optimizer remembers; its settings stay its own, as they may have been changed since.

        Without a schedule the learning rates are a part of what is loaded.
        """
        groups = self._optimizer.param_groups
        known = self._optimizer.defaults.keys() - {"lr"}  # other keys are an optimizer's memory, and are loaded
        settings = [{key: value for key, value in group.items() if key in known} for group in groups]
        self._optimizer.load_state_dict(state)
        for group, own in zip(self._optimizer.param_groups, settings, strict=True):
            group.update(own)
        self._bind()

    def _bind(self) -> None:
        """Put the tensors where the optimizer reads its learning rates."""
        if self._table is None:
            return
        _keep_on_device(self._optimizer)
        self._rates_of_groups = list(self._row[0])
        for group, rate in zip(self._optimizer.param_groups, self._rates_of_groups, strict=True):
            if self._schedule is None:
                rate.fill_(float(group["lr"]))
            group["lr"] = rate

    def of_step(self, step: int) -> float:
        """The learning rate of the first group at `step`."""
        if self._schedule is None:
            return float(self._optimizer.param_groups[0]["lr"])
        return self._highest[0] * self._schedule(step)

    def set_for(self, step: int) -> None:
        """Say on the host which step comes next."""
        if self._schedule is None:
            self._take_changed_rates()
            return
        factor = self._schedule(step)
        if self._table is None:
            for group, highest in zip(self._optimizer.param_groups, self._highest, strict=True):
                group["lr"] = highest * factor
            return
        position = self._counter.on_host
        if self._first + position != step or not self._factors or self._factors[position] != factor:
            self._fill(step, position, factor)

    def _take_changed_rates(self) -> None:
        """Somebody may have put a number where the tensor was that a graph reads."""
        if self._table is not None:
            for group, rate in zip(self._optimizer.param_groups, self._rates_of_groups, strict=True):
                if group["lr"] is not rate:
                    rate.fill_(float(group["lr"]))
                    group["lr"] = rate

    def apply(self) -> None:
        """Look up this step's learning rates; a part of the step."""
        if self._table is not None and self._schedule is not None:
            torch.index_select(self._table, 0, self._counter.position, out=self._row)

    def constants(self) -> list[Any]:
        """All other settings of the optimizer.

        Raises:
            HotloopError: it has got more parameter groups.
        """
        groups = self._optimizer.param_groups
        if len(groups) != len(self._highest):
            raise HotloopError(
                f"the optimizer has {len(groups)} parameter groups, and had {len(self._highest)} when Step took it",
                "their learning rates are kept on the device since then",
                "add_param_group before Step(...)",
            )
        return [value for group in groups for key, value in group.items() if key not in ("params", "lr")]

    def _fill(self, step: int, position: int, factor: float) -> None:
        """Look ahead as far as the counter goes; `set_for` notices where the schedule turns out otherwise."""
        assert self._table is not None
        assert self._schedule is not None
        factors = [factor] * (position + 1)
        for ahead in range(1, Counter.CAPACITY - position):
            try:
                factors.append(self._schedule(step + ahead))
            except (IndexError, KeyError, ValueError, ZeroDivisionError):  # a schedule that ends where the run does
                factors += [factors[-1]] * (Counter.CAPACITY - len(factors))
                break
        self._factors, self._first = factors, step - position
        rates = torch.tensor(factors)[:, None] * torch.tensor(self._highest)
        self._table.copy_(rates.pin_memory(), non_blocking=True)


_FEW = 64
"""Up to this many tensors the update is compiled with the model. torch's fused kernels give each 65,536 weights one
block of threads, so that a small network's update waits for a few slow blocks: 27 of 112 µs a step of a three-layer
network on an H200."""


def compiled_update(optimizer: Optimizer) -> Callable[[], object] | None:
    """The optimizer's step, compiled where that is faster than its fused form; None elsewhere.

    On a GPU, for SGD, Adam and AdamW over few tensors. Another rounding apart, the numbers are the same.
    """
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    suited = type(optimizer) in _FUSED and all(tensor.is_cuda for tensor in tensors) and len(tensors) <= _FEW
    if not suited:
        return None
    for group in optimizer.param_groups:
        group.update(fused=False, foreach=True)
    update: Callable[[], object] = torch.compile(optimizer.step, dynamic=False)
    return update


def fuse_again(optimizer: Optimizer) -> None:
    """Take back what `compiled_update` set: its compilation failed."""
    for group in optimizer.param_groups:
        group.update(fused=True, foreach=False)


def _obstacle(optimizer: Optimizer) -> str:
    for group in optimizer.param_groups:
        if not (group.get("fused") or "capturable" in group or _can_be_fused(optimizer, group)):
            return f"{type(optimizer).__name__} has neither a fused nor a capturable form"
    return ""


def _can_be_fused(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether torch has it fused and the user did not say otherwise; a subclass may do something else."""
    on_gpu = all(parameter.is_cuda and parameter.is_floating_point() for parameter in group["params"])
    asked = group.get("fused") is False or group.get("foreach") or group.get("differentiable")
    return type(optimizer) in _FUSED and on_gpu and not asked


def _keep_on_device(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        if not group.get("fused") and _can_be_fused(optimizer, group):
            group.update(fused=True, foreach=False)
            # What the constructors set for fused=True; GradScaler looks at the first.
            optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
            optimizer._need_device_dtype_check_for_fused = True  # type: ignore[attr-defined]
        if "capturable" in group:
            group["capturable"] = True
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].to(parameter.device)
