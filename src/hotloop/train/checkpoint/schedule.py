"""When the next checkpoint is due."""

import time
from collections.abc import Callable
from dataclasses import replace

from hotloop.core.history import History
from hotloop.core.save_interval import young_interval
from hotloop.core.units import Interval, format_seconds

_NO_HISTORY = History()


class SaveSchedule:
    """Says when the next checkpoint is due.

    "auto": at the end of an epoch if a save would cost at most 1 % of the time since the last one, and within an epoch
    by Young's formula, from the seconds for which the last save kept the training waiting; and never sooner than a save
    takes to be written.

    Args:
        every: an interval, or "auto".
        interruption_seconds: between two interruptions, as it is taken to be before anything is known, for "auto".
        clock: seconds, monotonic.
        history: of the run's earlier starts.
    """

    _FIRST_SAVE_SECONDS = 1.0
    """What a save is taken to cost before there was one."""
    _TOLD_SECONDS = 1.0
    """Of waiting."""

    def __init__(
        self, every: Interval | str, interruption_seconds: float, clock: Callable[[], float] = time.monotonic,
        history: History = _NO_HISTORY,
    ) -> None:  # fmt: skip
        self._every = every
        self._interruption_seconds = interruption_seconds
        self._clock = clock
        self._history = history
        self._started = self._last = clock()
        self._stalled_seconds = 0.0
        self._save_seconds = 0.0
        self._told = False

    @property
    def by_clock(self) -> bool:
        """Whether processes with clocks of their own may differ about when one is due."""
        return not isinstance(self._every, Interval) or self._every.unit == "seconds"

    def may_come(self, epochs: int, steps: int) -> bool:
        """Whether one may be due before the end of a training of so many epochs and steps."""
        if not isinstance(self._every, Interval) or self._every.unit == "seconds":
            return True
        return self._every.amount < (steps if self._every.unit == "steps" else epochs)

    @property
    def every_seconds(self) -> float:
        """Between saves, as it looks now; 0 where steps or epochs are counted."""
        if isinstance(self._every, Interval):
            return self._every.amount if self._every.unit == "seconds" else 0.0
        so_far = replace(self._history, seconds=self._history.seconds + self._clock() - self._started)
        expected = so_far.expected_seconds(self._interruption_seconds)
        young = young_interval(self._stalled_seconds or self._FIRST_SAVE_SECONDS, expected)
        return max(young, self._save_seconds)

    def due(self, step: int, finished_epochs: int | None) -> bool:
        """Whether to save after `step`; `finished_epochs` counts them where one has just ended, None elsewhere."""
        since = self._clock() - self._last
        if isinstance(self._every, Interval):
            match self._every.unit:
                case "steps":
                    return finished_epochs is None and step % int(self._every.amount) == 0
                case "epochs":
                    return finished_epochs is not None and finished_epochs % int(self._every.amount) == 0
                case "seconds":
                    return since >= self._every.amount
        if since < self._save_seconds:
            return False
        if finished_epochs is not None:
            return since >= 100 * self._stalled_seconds
        return since >= self.every_seconds

    def saved(self, stalled_seconds: float, seconds: float) -> None:
        """A save has just been done: the training has waited so long for it, and until it was whole it took longer."""
        self._last = self._clock() - (seconds - stalled_seconds)
        self._stalled_seconds, self._save_seconds = stalled_seconds, seconds

    def wait_warning(self, waited_seconds: float) -> str:
        """What to say, once, of a save that came before the last one was whole; empty if there is nothing to say.

        Args:
            waited_seconds: for which the training has waited for that one.
        """
        if self._told or waited_seconds < self._TOLD_SECONDS or not isinstance(self._every, Interval):
            return ""
        self._told = True
        return (
            f"the training waited {format_seconds(waited_seconds)} until the checkpoint before was written, which took "
            f"{format_seconds(self._save_seconds)}: longer than from one to the next "
            '(checkpoint.every = "auto" begins none before the last is whole)'
        )
