"""A model's buffers: what a repeated step has to put back, and whether they stay the same tensors."""

from torch import Tensor, nn


class Buffers:
    """The buffers of a model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before: list[tuple[Tensor, Tensor]] = []
        self._known: dict[str, Tensor] | None = None

    def remember(self) -> None:
        """Their values are those to go back to."""
        self._before = [(buffer, buffer.detach().clone()) for buffer in self._model.buffers()]

    def forget(self) -> None:
        """There is nothing to go back to."""
        self._before = []

    def go_back(self) -> None:
        for buffer, before in self._before:
            buffer.copy_(before)

    def replaced(self) -> str:
        """The name of one that is another tensor than at the last call, or was not there; the first call finds none,
        as what a model makes in its first pass may stay.
        """
        known, self._known = self._known, dict(self._model.named_buffers())
        if known is None:
            return ""
        return next((name for name, buffer in self._known.items() if buffer is not known.get(name)), "")
