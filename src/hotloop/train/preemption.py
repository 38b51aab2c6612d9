"""Notice that the end is near: signals set a flag, the loop looks at it between steps."""

import signal
import threading
from types import FrameType


class Preemption:
    """Turns SIGTERM and a first SIGINT into a request to save and stop; a context manager.

    The handler only sets a flag: what it interrupts may be anything. A second SIGINT interrupts at once, as usual.
    Outside the main thread it watches nothing, as Python allows no handler there.
    """

    def __init__(self) -> None:
        self._reason = ""
        self._previous: dict[signal.Signals, signal._HANDLER] = {}

    @property
    def requested(self) -> str:
        """Name of the signal that asked to stop, or nothing."""
        return self._reason

    def __enter__(self) -> "Preemption":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._notice)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _notice(self, number: int, frame: FrameType | None) -> None:
        self._reason = signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
