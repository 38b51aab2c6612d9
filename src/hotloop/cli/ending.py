"""What a scheduler or a closed terminal sends, heard as Ctrl-C."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Ending:
    """By which signal a command was asked to end; SIGINT, Ctrl-C's, where it was none of the others."""

    number: int = signal.SIGINT

    @property
    def code(self) -> int:
        """What the command then exits with, as shells count."""
        return 128 + self.number


@contextmanager
def ended_by_signals() -> Iterator[Ending]:
    """SIGTERM and SIGHUP end what is done inside as Ctrl-C does, and the command with their own code."""
    ending = Ending()

    def end(number: int, frame: object) -> None:
        for each in before:  # a second one, as schedulers send, would break off the cleaning up
            signal.signal(each, signal.SIG_IGN)
        ending.number = number
        raise KeyboardInterrupt

    # nohup's stay ignored
    heard = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is not signal.SIG_IGN]
    before = {each: signal.getsignal(each) for each in heard}
    for each in heard:
        signal.signal(each, end)
    try:
        yield ending
    except KeyboardInterrupt:
        if ending.number == signal.SIGINT:
            raise
        sys.exit(ending.code)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
