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
        self._model = model
        self._decay = decay
        self._started = False

    @torch.no_grad()
    def update(self) -> None:
        """Take in the model's weights; the first update copies them."""
        values, averages = _tensors(self._model), _tensors(self.module)
        if _shapes(values) != _shapes(averages):
            averages = self._follow(averages)
        floating = {name for name, value in values.items() if value.is_floating_point()}
        mine, theirs = [averages[name] for name in floating], [values[name] for name in floating]
        if self._started:
            torch._foreach_lerp_(mine, theirs, 1 - self._decay)
        else:
            torch._foreach_copy_(mine, theirs)
            self._started = True
        if others := [name for name in values if name not in floating]:
            torch._foreach_copy_([averages[name] for name in others], [values[name] for name in others])

    def _follow(self, before: dict[str, Tensor]) -> dict[str, Tensor]:
        """The model has other tensors than at first, a table made in its first call say: those begin anew."""
        self.module = copy.deepcopy(self._model)
        averages = _tensors(self.module)
        for name, average in averages.items():
            if name in before and before[name].shape == average.shape:
                average.copy_(before[name])
        return averages

    def state_dict(self) -> dict[str, Any]:
        return {"module": self.module.state_dict(), "started": self._started}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`; from an empty one, of a step without averages, with the model's weights now."""
        self._started = False
        if state:
            self.module.load_state_dict(state["module"])
            self._started = state["started"]
        else:
            self.update()
            self._started = False


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Weights and buffers by name."""
    return {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def _shapes(tensors: dict[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}
