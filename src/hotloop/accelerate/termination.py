"""SIGTERM as the script's own chance to save."""

import os
import signal
import threading
from types import FrameType


def save_on_sigterm() -> None:
    """Have SIGTERM end the script as Ctrl-C does, which scripts are written for, where it has no handler of its own:
    it would end at once, `finally` and `except KeyboardInterrupt` passed over.
    """
    ours, process = threading.current_thread() is threading.main_thread(), os.getpid()
    if not ours or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one is not waited for
        if os.getpid() != process:
            os.kill(os.getpid(), signal.SIGTERM)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)
