"""One training step: forward, backward, and on the last batch of a window unscale, clip, step, average."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler, autocast
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hotloop.core.errors import HotloopError
from hotloop.train.schedule import Schedule

Loss = Callable[[nn.Module, Any], Tensor]
"""(model, batch) -> mean loss over the batch, a scalar."""

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class StepSettings:
    """What a step does besides forward and backward.

    Attributes:
        precision: fp32, tf32, bf16 or fp16 (with loss scaling).
        clip_norm: largest norm of all gradients together, after unscaling; 0: none.
        ema: decay of the averaged weights; 0: none.
    """

    precision: str = "fp32"
    clip_norm: float = 0.0
    ema: float = 0.0


class Step:
    """Trains a model by one batch a call.

    Args:
        model: on its device.
        loss: called with model and batch under the step's precision; returns the batch's mean loss.
        optimizer: over the model's parameters, learning rates at their highest.
        schedule: factor of the learning rate at each step; constant without one.
        settings: precision, clipping, averaging.

    Attributes:
        averaged: the averaged weights, if `settings.ema` asks for them.
        number: optimizer steps taken.
        skipped: steps whose gradients overflowed fp16 and were left out, the scale lowered.

    Example:
        ```python
        step = hotloop.Step(model, lambda model, batch: loss(model(batch[0]), batch[1]), optimizer)
        for batch in loader:
            step(batch)
        ```
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: Optimizer,
        schedule: Schedule = lambda step: 1.0,
        settings: StepSettings = StepSettings(),
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.settings = settings
        self.number = 0
        self.skipped = 0
        self._loss = loss
        self._schedule = schedule
        self._highest = [group["lr"] for group in optimizer.param_groups]
        self._device = next(model.parameters()).device.type
        self._scaler = GradScaler(self._device, enabled=settings.precision == "fp16")
        self.averaged = (
            AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(settings.ema), use_buffers=True)  # type: ignore[no-untyped-call]
            if settings.ema
            else None
        )

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step, of the first parameter group."""
        return float(self._highest[0] * self._schedule(self.number))

    @property
    def scale(self) -> float:
        """What the loss is multiplied by before backward: 1 unless fp16."""
        return float(self._scaler.get_scale())

    def autocast(self) -> AbstractContextManager[object]:
        """The step's precision, for evaluation."""
        dtype = _AUTOCAST.get(self.settings.precision)
        return autocast(self._device, dtype=dtype) if dtype else nullcontext()

    def __call__(self, batch: Any, share: float = 1.0, last: bool = True) -> Tensor:
        """Train on one batch.

        Args:
            batch: what `loss` takes.
            share: the batch's part in its window: its samples over the window's, so that the gradient is the mean over
                the window's samples however short the last one is.
            last: whether the window ends here and the weights change.

        Raises:
            HotloopError: the loss is no tensor, or not one value.

        Returns:
            The batch's mean loss times its share, a scalar on the device, not waited for.
        """
        with self.autocast():
            loss = self._loss(self.model, batch)
        if not isinstance(loss, Tensor) or loss.ndim:
            kind = f"has shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"is a {type(loss).__name__}"
            raise HotloopError(f"the loss {kind}", "a step needs a tensor of one value", "return its mean: loss.mean()")
        loss = loss.float() * share
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        if last:
            self._update()
        return loss.detach()

    def _update(self) -> None:
        factor = self._schedule(self.number)
        for group, highest in zip(self.optimizer.param_groups, self._highest, strict=True):
            group["lr"] = highest * factor
        if self.settings.clip_norm:
            self._scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip_norm)
        if self._scaler.is_enabled():
            before = self.scale
            self._scaler.step(self.optimizer)
            self._scaler.update()
            self.skipped += self.scale < before
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.number += 1
        if self.averaged is not None:
            self.averaged.update_parameters(self.model)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self._scaler.state_dict(),
            "averaged": self.averaged.state_dict() if self.averaged is not None else {},
            "number": self.number,
            "skipped": self.skipped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()` of a step over the same model and optimizer."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._scaler.load_state_dict(state["scaler"])
        if self.averaged is not None and state["averaged"]:
            self.averaged.load_state_dict(state["averaged"])
        self.number = state["number"]
        self.skipped = state["skipped"]
