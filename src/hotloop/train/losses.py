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
from hotloop.train.world import World


class Losses:
    """Brings the losses of steps to the host, some steps later, and knows the samples of each step until then.

    Args:
        ring: where the step writes them.
        dataset: names the samples of a step whose loss is not finite.
        world: of the ranks that have each a part of a step's samples.
    """

    def __init__(self, ring: LossRing, dataset: Dataset, world: World) -> None:
        self._ring = ring
        self._dataset = dataset
        self._world = world
        self._steps: list[tuple[int, list[np.ndarray]]] = []

    @property
    def full(self) -> bool:
        """Whether they have to be taken now."""
        return self._ring.pending >= Counter.CAPACITY - 1

    def add(self, number: int, indices: list[np.ndarray]) -> None:
        """Remember a step, numbered from 1, whose loss is in the ring, and its samples."""
        self._steps.append((number, indices))

    def take(self, wait: bool = False) -> list[float]:
        """Losses that have arrived since the last call, means over the ranks; with `wait`, all of them.

        Raises:
            NonFiniteLoss: one is NaN or infinite; the step, its samples and the rank are named, on all ranks the same.
        """
        arrived = self._ring.take(wait)
        steps, self._steps = self._steps[: len(arrived)], self._steps[len(arrived) :]
        means = [loss / self._world.size for loss in self._world.sum(arrived)]
        for step, own, mean in zip(steps, arrived, means, strict=True):
            if not math.isfinite(mean):
                found = self._world.gathered(None if math.isfinite(own) else self._non_finite(*step, own))
                raise next(filter(None, found))
        return means

    def _non_finite(self, number: int, indices: list[np.ndarray], value: float) -> NonFiniteLoss:
        samples = np.concatenate(indices)
        names = ", ".join(self._dataset.name(int(index)) for index in samples[:8])
        more = f" and {len(samples) - 8} more" if len(samples) > 8 else ""
        return NonFiniteLoss(
            f"the loss of step {number} is {value}{self._world.where}",
            f"its batch was {names}{more}",
            "look at those samples; a lower optimizer.learning_rate, train.clip_norm=1 or precision=fp32 may help",
        )


def check_finite(parameters: list[Tensor], step: int, where: str = "") -> None:
    """Refuse weights that are not finite: they must never become a checkpoint.

    Args:
        where: of several ranks, this one.

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
            f"the weights after step {step} are not finite{where}",
            "the step's gradients were NaN or infinite, or the learning rate too high",
            "a lower optimizer.learning_rate, train.clip_norm=1 or precision=fp32 may help",
        )
