"""What the stages of the way of a batch take."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Stages:
    """Seconds, added up over batches. Stages work side by side.

    Attributes:
        late: the training process waited for the workers; beside a GPU waits that outlasted its work.
        behind: it waited so for decoders and copies of the device, which was out of work by then.
        reading: workers had a file or a place in a shard opened and read; all workers added up.
        working: workers were at work, reading included; all workers added up.
        decoding: a decoder of the device was at work.
        copying: batches were on their way to the device.
    """

    late: float = 0.0
    behind: float = 0.0
    reading: float = 0.0
    working: float = 0.0
    decoding: float = 0.0
    copying: float = 0.0

    def plus(self, other: "Stages") -> "Stages":
        """Both, added up."""
        return Stages(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def minus(self, other: "Stages") -> "Stages":
        """What came after `other` was measured."""
        return Stages(*(getattr(self, each.name) - getattr(other, each.name) for each in fields(self)))


NOTHING = Stages()


class ReadingTime:
    """Seconds that this process has spent on opening and reading what samples are stored in."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def added(self) -> Iterator[None]:
        """Add what happens inside."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - started


READING = ReadingTime()
