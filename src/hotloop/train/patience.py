"""What is done while the next batch does not come, and about workers that will not bring one any more."""

from collections.abc import Callable
from pathlib import Path

from hotloop.core.units import format_seconds

_WARN_SECONDS = 30.0
_STOP_SECONDS = 10.0
"""A cloud's notice may give 30 s, in which the last batch, the step and the checkpoint have to come."""


class StopRequested(Exception):
    """The run is to be saved and stopped here."""


class Patience:
    """Waits on, says once for each such wait which files are waited for, and lets a request to stop through.

    A mount that does not answer holds a worker for as long as it likes; the training must not hang with it.

    Args:
        requested: whether the run is to stop.
        notify: told what is waited for.
        alone: stop at once when asked to; otherwise only after ten seconds, as most batches come by then, after which
            all ranks stop together and save.
    """

    def __init__(self, requested: Callable[[], bool], notify: Callable[[str], None], *, alone: bool = True) -> None:
        self._requested = requested
        self._notify = notify
        self._least_seconds = 0.0 if alone else _STOP_SECONDS
        self._told = 0.0

    def __call__(self, seconds: float, names: list[str]) -> None:
        if seconds >= self._least_seconds and self._requested():
            raise StopRequested
        if seconds < self._told:  # another wait
            self._told = 0.0
        if seconds >= _WARN_SECONDS and not self._told:
            self._told = seconds
            at = f"; workers are at {', '.join(names[:4])}" if names else ""
            where = f" (is {Path(names[0]).parent} there?)" if names else ""
            self._notify(f"no batch for {format_seconds(seconds)}{at}{where}")


class WorkerDeaths:
    """Counts the data workers that died and were replaced, and tells of each.

    Nothing is lost by it but time. Where memory is short it comes again and again, though, and should not be silent.

    Args:
        notify: told of each.
    """

    def __init__(self, notify: Callable[[str], None]) -> None:
        self.count = 0
        self._notify = notify

    def __call__(self, exit_code: int) -> None:
        self.count += 1
        how = f"was killed by signal {-exit_code}" if exit_code < 0 else f"ended with exit code {exit_code}"
        often = " (most often for memory)" if exit_code == -9 else ""
        self._notify(f"a data worker {how}{often}; another one does its work, replaced so far: {self.count}")
