"""Whether the host or the device sets the pace of steps that are not captured."""

import statistics
import time

import torch

_SETTLE, _TIMED = 3, 5
"""Windows before any is timed, as what comes before them may have compiled; and those that count."""

_OF_HOST = 0.9
"""Share of a window's time that launching it may take, before the device waits for the host."""


class Pace:
    """Times windows of a step on the host and on the device."""

    def __init__(self) -> None:
        self._windows = 0
        self._started = 0.0
        self._shares: list[float] = []

    def begin(self) -> None:
        """A window starts."""
        self._windows += 1
        if self._windows > _SETTLE:
            torch.cuda.synchronize()
            self._started = time.perf_counter()

    def end(self) -> bool:
        """It is launched. Whether enough of them were timed by now."""
        if self._windows > _SETTLE:
            launched = time.perf_counter() - self._started
            torch.cuda.synchronize()
            self._shares.append(launched / (time.perf_counter() - self._started))
        return len(self._shares) == _TIMED

    @property
    def is_the_hosts(self) -> bool:
        """Whether the device has nothing left to do when a window is launched."""
        return statistics.median(self._shares) > _OF_HOST
