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
        self._averages, self._copies = _by_kind(self.module)

    @torch.no_grad()
    def update(self) -> None:
        """Take in the model's weights; the first update copies them."""
        values, sources = _by_kind(self._model)  # each time: a model may put new tensors where its buffers were
        if self._started:
            torch._foreach_lerp_(self._averages, values, 1 - self._decay)
        else:
            torch._foreach_copy_(self._averages, values)
            self._started = True
        if self._copies:
            torch._foreach_copy_(self._copies, sources)

    def state_dict(self) -> dict[str, Any]:
        return {"module": self.module.state_dict(), "started": self._started}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state["module"])
        self._started = state["started"]


def _by_kind(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Weights and floating buffers; other buffers."""
    tensors = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
    floating = [tensor for tensor in tensors if tensor.is_floating_point()]
    return floating, [tensor for tensor in tensors if not tensor.is_floating_point()]
