"""A step's batches, where it has several: what they change before the last of them is done."""

from typing import Any

import torch
from torch import Tensor, nn

from hotloop.train.random_state import generators, restore_generators


class Window:
    """Goes back to where a window of batches began: a step that is not done is no part of what is saved.

    Gradients are not saved; statistics of normalisations are, and what dropout draws next.

    Args:
        model: whose buffers they are.
    """

    def __init__(self, model: nn.Module) -> None:
        self._buffers = list(model.buffers())
        self._kept: list[Tensor] = []
        self._drawn: tuple[Any, ...] = ()

    def begin(self) -> None:
        """Remember how it is now. Costs 30 µs, and a copy of the buffers on their device."""
        if not self._kept:
            self._kept = [buffer.clone() for buffer in self._buffers]
        elif self._buffers:
            torch._foreach_copy_(self._kept, self._buffers)
        self._drawn = generators()

    def end(self) -> None:
        """The step is done."""
        self._drawn = ()

    def undo(self) -> None:
        """If one has begun and not ended: as it was."""
        if not self._drawn:
            return
        with torch.no_grad():
            for buffer, kept in zip(self._buffers, self._kept, strict=True):
                buffer.copy_(kept)
        restore_generators(self._drawn)
        self._drawn = ()
