"""Losses stay on the device and come to the host some steps later, so that no step waits for its own."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hotloop.core.errors import NonFiniteLoss
from hotloop.data.dataset import Dataset


@dataclass(frozen=True)
class TakenStep:
    """What is known of a step on the host when its work is queued.

    Attributes:
        number: of the step, from 1.
        indices: its samples.
    """

    number: int
    indices: tuple[int, ...]


class Losses:
    """Collects one loss a step on the device; `take` brings those of the last window to the host.

    On a GPU the copy is queued behind the steps and read at the next `take`, when it has long arrived.

    Args:
        device: where the losses are.
        window: the most steps between two `take`s.
        dataset: names the samples of a step whose loss is not finite.
    """

    def __init__(self, device: torch.device, window: int, dataset: Dataset) -> None:
        self._device = device
        self._buffer = torch.zeros(window, device=device)
        self._dataset = dataset
        self._steps: list[TakenStep] = []
        self._arriving: tuple[list[TakenStep], Tensor, torch.cuda.Event | None] = ([], torch.zeros(0), None)

    def __len__(self) -> int:
        """Steps collected since the last `take`."""
        return len(self._steps)

    def add(self, step: TakenStep, losses: list[Tensor]) -> None:
        """Keep a step's loss, given as the shares of its batches."""
        self._buffer[len(self._steps)] = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
        self._steps.append(step)

    def take(self, wait: bool = False) -> list[float]:
        """Losses that have arrived since the last call; with `wait`, all of them.

        Raises:
            NonFiniteLoss: one is NaN or infinite; the step and its samples are named.
        """
        arrived = self._arrive()
        if self._steps:
            copy = self._buffer[: len(self._steps)].to("cpu", non_blocking=True, copy=True)
            event = torch.cuda.Event() if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]
            if event:
                event.record()
            self._arriving, self._steps = (self._steps, copy, event), []
        if wait or self._device.type == "cpu":
            arrived += self._arrive()
        return arrived

    def _arrive(self) -> list[float]:
        steps, losses, event = self._arriving
        self._arriving = ([], torch.zeros(0), None)
        if event:
            event.synchronize()
        values: list[float] = losses.tolist()
        for step, value in zip(steps, values, strict=True):
            if not math.isfinite(value):
                raise self._non_finite(step, value)
        return values

    def _non_finite(self, step: TakenStep, value: float) -> NonFiniteLoss:
        names = ", ".join(self._dataset.name(index) for index in step.indices[:8])
        more = f" and {len(step.indices) - 8} more" if len(step.indices) > 8 else ""
        return NonFiniteLoss(
            f"the loss of step {step.number} is {value}",
            f"its batch was {names}{more}",
            "look at those samples; a lower optimizer.learning_rate, train.clip_norm=1 or precision=fp32 may help",
        )


def check_finite(parameters: list[Tensor], step: int) -> None:
    """Refuse weights that are not finite: they must never become a checkpoint.

    Raises:
        NonFiniteLoss: a weight is NaN or infinite.
    """
    norms = torch.stack(torch._foreach_norm([parameter.detach() for parameter in parameters]))
    if not torch.isfinite(norms).all():
        raise NonFiniteLoss(
            f"the weights after step {step} are not finite",
            "the step's gradients were NaN or infinite, or the learning rate too high",
            "a lower optimizer.learning_rate, train.clip_norm=1 or precision=fp32 may help",
        )
