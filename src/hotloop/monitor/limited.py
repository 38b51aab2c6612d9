"""Calls that may never come back, as those of a driver whose card has gone."""

from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Generic, TypeVar

T = TypeVar("T")


class Limited(Generic[T]):
    """One call, made again and again on a thread of its own.

    A thread that hangs in the driver cannot be ended: it is left, does not hold up the end of the process, and until it
    comes back nothing more is asked of it. It stays between calls: a new one each time costs more than a short call.
    """

    def __init__(self, call: Callable[[], T], name: str) -> None:
        self._call, self._name = call, name
        self._thread: Thread | None = None
        self._asked: SimpleQueue[bool] = SimpleQueue()
        self._answers: SimpleQueue[tuple[T | None, Exception | None]] = SimpleQueue()
        self._waits = self._late = False

    def start(self) -> None:
        """Make the call, unless the last one has not come back yet."""
        if self._thread is None:
            self._thread = Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        if self._waits and not self._answers.empty():  # it came back after all; what it brings is old
            self._answers.get()
            self._waits = False
        if not self._waits:
            self._waits, self._late = True, False
            self._asked.put(True)

    def settle(self, seconds: float) -> None:
        """Wait until it has come back, for so long at most; who was late before is not waited for."""
        if not self._late:
            with suppress(Empty):
                self._answers.put(self._answers.get(timeout=seconds))

    def finish(self, seconds: float) -> T:
        """What came of it.

        Raises:
            TimeoutError: it is still under way after so long; who was late once is not waited for again.
            Exception: what the call raised.
        """
        try:
            result, error = self._answers.get(timeout=0.0 if self._late else max(0.0, seconds))
        except Empty:
            self._late = True
            raise TimeoutError(f"{self._name} does not come back") from None
        self._waits = False
        if error:
            raise error
        return result  # type: ignore[return-value]

    def close(self) -> None:
        """End the thread, once its call has come back."""
        self._asked.put(False)

    def _work(self) -> None:
        while self._asked.get():
            try:
                self._answers.put((self._call(), None))
            except Exception as error:
                self._answers.put((None, error))
