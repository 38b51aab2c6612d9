"""What is made of the losses when they come to the host: none may be NaN or infinite."""

import math

import numpy as np
import torch
from torch import Tensor

from hotloop.core.errors import NonFiniteLoss
from hotloop.data.dataset import Dataset
from hotloop.train.counter import Counter
from hotloop.train.loss_ring import LossRing
from hotloop.train.sharded import local


class Losses:
    """Brings the losses of steps to the host, some steps later, and knows the samples of each step until then.

    Args:
        ring: where the step writes them.
        dataset: names the samples of a step whose loss is not finite.
    """

    def __init__(self, ring: LossRing, dataset: Dataset) -> None:
        self._ring = ring
        self._dataset = dataset
        self._steps: list[tuple[int, list[np.ndarray]]] = []

    @property
    def full(self) -> bool:
        """Whether they have to be taken now."""
        return self._ring.pending >= Counter.CAPACITY - 1

    def add(self, number: int, indices: list[np.ndarray]) -> None:
        """Remember a step, numbered from 1, whose loss is in the ring, and its samples."""
        self._steps.append((number, indices))

    def take(self, wait: bool = False) -> list[float]:
        """Losses that have arrived since the last call; with `wait`, all of them.

        Raises:
            NonFiniteLoss: one is NaN or infinite; the step and its samples are named.
        """
        arrived = self._ring.take(wait)
        steps, self._steps = self._steps[: len(arrived)], self._steps[len(arrived) :]
        for (number, indices), value in zip(steps, arrived, strict=True):
            if not math.isfinite(value):
                raise self._non_finite(number, np.concatenate(indices), value)
        return arrived

    def _non_finite(self, number: int, indices: np.ndarray, value: float) -> NonFiniteLoss:
        names = ", ".join(self._dataset.name(int(index)) for index in indices[:8])
        more = f" and {len(indices) - 8} more" if len(indices) > 8 else ""
        return NonFiniteLoss(
            f"the loss of step {number} is {value}",
            f"its batch was {names}{more}",
            "look at those samples; a lower optimizer.learning_rate, train.clip_norm=1 or precision=fp32 may help",
        )


def check_finite(parameters: list[Tensor], step: int) -> None:
    """Refuse weights that are not finite: they must never become a checkpoint.

    Raises:
        NonFiniteLoss: a weight is NaN or infinite.
    """
    own = [local(parameter.detach()) for parameter in parameters]
    inexact = [p for p in own if p.numel() and (p.is_floating_point() or p.is_complex())]
    if not inexact:  # of a model with fewer rows than there are ranks
        return
    largest = torch._foreach_norm(inexact, ord=math.inf)  # any other norm may overflow where every weight is finite
    if not torch.isfinite(torch.stack(largest)).all():
        raise NonFiniteLoss(
            f"the weights after step {step} are not finite",
            "the step's gradients were NaN or infinite, or the learning rate too high",
            "a lower optimizer.learning_rate, train.clip_norm=1 or precision=fp32 may help",
        )
