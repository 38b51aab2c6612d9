"""SIGTERM as the script's own chance to save."""

import os
import signal
import threading
import time
from types import FrameType

_SAME_SECONDS = 1.0


def save_on_sigterm() -> None:
    """Have SIGTERM end the script as Ctrl-C does, which scripts are written for, where it has no handler of its own:
    it would end at once, `finally` and `except KeyboardInterrupt` passed over.
    """
    ours, process = threading.current_thread() is threading.main_thread(), os.getpid()
    if not ours or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return

    first = 0.0

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal first
        if first and os.getpid() == process and time.monotonic() - first < _SAME_SECONDS:
            return  # schedulers signal a whole group, and its parents pass it on
        if first or os.getpid() != process:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        first = time.monotonic()
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)
