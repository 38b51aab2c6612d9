"""Calls that may never come back, as those of a driver whose card has gone."""

from collections.abc import Callable
from threading import Thread
from typing import Generic, TypeVar

T = TypeVar("T")


class Limited(Generic[T]):
    """One call, made again and again on threads of its own, at most one at a time.

    A thread that hangs in the driver cannot be ended: it is left, does not hold up the end of the process, and until it
    comes back no other one is started.
    """

    def __init__(self, call: Callable[[], T], name: str) -> None:
        self._call, self._name = call, name
        self._thread: Thread | None = None
        self._results: list[T] = []
        self._errors: list[Exception] = []
        self._late = False

    @property
    def hangs(self) -> bool:
        """The last call has not come back yet."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Make the call, unless the last one has not come back yet."""
        if not self.hangs:
            self._results, self._errors, self._late = [], [], False
            self._thread = Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()

    def finish(self, seconds: float) -> T:
        """What came of it.

        Raises:
            TimeoutError: it is still under way after so long; who was late once is not waited for again.
            Exception: what the call raised.
        """
        assert self._thread
        self._thread.join(0.0 if self._late else max(0.0, seconds))
        if self._thread.is_alive():
            self._late = True
            raise TimeoutError(f"{self._name} does not come back")
        if self._errors:
            raise self._errors[0]
        return self._results[0]

    def _work(self) -> None:
        results, errors = self._results, self._errors
        try:
            results.append(self._call())
        except Exception as error:
            errors.append(error)
