"""Parameters that stand in for a model's own while its gradients are computed."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class StandIns:
    """Parameters in the same memory as a model's own, in their places for the time of a pass.

    DistributedDataParallel holds on to the autograd nodes that add up the gradients of the model's own parameters. They
    belong to the stream on which it was made: what arrives there lets that stream wait for the one of the pass, also
    if only the gradient is asked for, and a capture breaks off. The nodes of the stand-ins are made in the pass.

    Args:
        model: whose modules hold the parameters.
        parameters: that require a gradient.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[Tensor]) -> None:
        self._parameters = list(parameters)
        self._stand_ins = [nn.Parameter(parameter.detach()) for parameter in parameters]
        by_own = {id(own): stand_in for own, stand_in in zip(self._parameters, self._stand_ins, strict=True)}
        self._places = [
            (module._parameters, name, by_own[id(own)])
            for module in model.modules()
            for name, own in module._parameters.items()
            if id(own) in by_own
        ]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Modules have the stand-ins within; forward, and backward for what it computes again, belong there."""
        before = [held[name] for held, name, _ in self._places]
        for held, name, stand_in in self._places:
            held[name] = stand_in
        try:
            yield
        finally:
            for (held, name, _), own in zip(self._places, before, strict=True):
                held[name] = own

    def gradients(self, loss: Tensor, scale: Tensor) -> list[Tensor | None]:
        """Gradients of `loss` times `scale`, in the order of the parameters; None where it does not depend on one.

        Also through a parameter itself, which code may hold on to beside the module: torch's LSTM does.
        """
        count = len(self._parameters)
        found = torch.autograd.grad(loss, [*self._stand_ins, *self._parameters], scale, allow_unused=True)
        return [_sum(*both) for both in zip(found[:count], found[count:], strict=True)]


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return one + other if one is not None and other is not None else one if other is None else other
