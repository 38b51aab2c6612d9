"""Losses stay on the device, in a ring that a captured step can write to, and come to the host some steps later."""

import torch
from torch import Tensor

from hotloop.train.counter import Counter


class LossRing:
    """One loss a step, on the device, in the place that the counter says.

    On a GPU a copy is queued behind the steps and read at the next `take`, when it has long arrived. Losses that are
    not taken within `Counter.CAPACITY` steps are overwritten.

    Attributes:
        pending: losses written since the last `take`.
    """

    def __init__(self, counter: Counter, device: torch.device) -> None:
        self.pending = 0
        self._counter = counter
        self._device = device
        self._buffer = torch.zeros(Counter.CAPACITY, device=device)
        self._arriving: tuple[Tensor, torch.cuda.Event | None] = (torch.zeros(0), None)

    def write(self, loss: Tensor) -> None:
        """Put a loss, a float32 scalar, at the counter's position; device work only, a part of the step."""
        self._buffer.index_copy_(0, self._counter.position, loss.reshape(1))

    def written(self) -> None:
        """Count a loss on the host, whose work is queued, after the counter has been `advanced`."""
        self.pending = min(self.pending + 1, Counter.CAPACITY)

    def take(self, wait: bool = False) -> list[float]:
        """Losses that have arrived since the last call, in order; with `wait`, all of them."""
        arrived = self._arrive()
        if self.pending:
            copy = self._written().to("cpu", non_blocking=True, copy=True)
            event = torch.cuda.current_stream().record_event() if self._device.type == "cuda" else None
            self._arriving = (copy, event)
            self.pending = 0
        if wait or self._device.type == "cpu":
            arrived += self._arrive()
        return arrived

    def _written(self) -> Tensor:
        end = self._counter.on_host
        start = end - self.pending
        if start >= 0:
            return self._buffer[start:end]
        return torch.cat([self._buffer[start:], self._buffer[:end]])

    def _arrive(self) -> list[float]:
        losses, event = self._arriving
        self._arriving = (torch.zeros(0), None)
        if event:
            event.synchronize()
        values: list[float] = losses.tolist()
        return values
