"""Averaged weights, kept without asking the device anything, so that a captured step can keep them."""

import copy
from typing import Any

import torch
from torch import Tensor, nn


class Averaged:
    """An exponential moving average of a model's weights and floating buffers; other buffers are copied.

    Args:
        model: averaged; its weights now are the first average.
        decay: share of the old average that stays at each update.

    Attributes:
        module: a copy of the model that holds the averages.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.module = copy.deepcopy(model)
        self._decay = decay
        self._started = False
        pairs = zip(_tensors(self.module), _tensors(model), strict=True)
        floating: list[tuple[Tensor, Tensor]] = []
        others: list[tuple[Tensor, Tensor]] = []
        for mine, theirs in pairs:
            (floating if mine.is_floating_point() else others).append((mine, theirs))
        self._averages, self._values = [pair[0] for pair in floating], [pair[1] for pair in floating]
        self._copies, self._sources = [pair[0] for pair in others], [pair[1] for pair in others]

    @torch.no_grad()
    def update(self) -> None:
        """Take in the model's weights; the first update copies them."""
        if self._started:
            torch._foreach_lerp_(self._averages, self._values, 1 - self._decay)
        else:
            torch._foreach_copy_(self._averages, self._values)
            self._started = True
        if self._copies:
            torch._foreach_copy_(self._copies, self._sources)

    def state_dict(self) -> dict[str, Any]:
        return {"module": self.module.state_dict(), "started": self._started}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state["module"])
        self._started = state["started"]


def _tensors(model: nn.Module) -> list[Tensor]:
    return [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
