"""Reads ahead of whoever scrapes regularly: what takes milliseconds is done before the question comes.

It is read as often as without that, once a scrape: where none is expected nothing is read ahead, and where an expected
one does not come it was once in vain.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Condition, Thread

from hotloop.monitor.metrics import Metrics
from hotloop.monitor.text import Text

OLDEST_SECONDS = 1.0
"""That what was read ahead may be when it is handed out."""
_ALIKE_SECONDS = 0.25
"""Intervals that differ by no more are one: a scraper that comes so late gets what was read, one so early reads."""
_SOONEST_SECONDS, _LATEST_SECONDS = 0.75, 300.0
"""That a scrape is foreseen: before that, a reading serves two; after that, clocks and scrapers have drifted."""
_LEAST_LEAD_SECONDS, _MOST_LEAD_SECONDS = 0.1, 0.5
_LEAD = 3.0
"""Of what the last reading took; no two take the same."""
_MOST_SCRAPERS = 2
"""Two Prometheus servers often watch the same."""


def expected(arrivals: Sequence[float]) -> float | None:
    """When the next scrape comes, from when the last ones did, in seconds of one clock; None if that is not known.

    One scraper comes at even times; of two that take turns, each does. The same interval twice is believed.
    """
    for scrapers in range(1, _MOST_SCRAPERS + 1):
        if len(arrivals) < scrapers + 2:
            return None
        interval = arrivals[-1] - arrivals[-1 - scrapers]
        before = arrivals[-2] - arrivals[-2 - scrapers]
        if abs(interval - before) <= _ALIKE_SECONDS:
            coming = arrivals[-scrapers] + interval
            return coming if _SOONEST_SECONDS <= coming - arrivals[-1] <= _LATEST_SECONDS else None
    return None


@dataclass(frozen=True)
class _Page:
    text: Text
    content: bytes
    read_at: float


class Ahead:
    """Hands out all metrics as text, read when asked for, or shortly before. For any thread."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics, self._clock = metrics, clock
        self._changed = Condition()  # held while it is read: whoever comes then gets what is read
        self._arrivals: deque[float] = deque(maxlen=_MOST_SCRAPERS + 2)
        self._due: tuple[float, Text] | None = None
        self._ready: _Page | None = None
        self._took = 0.0
        self._closed = False
        self._thread = Thread(target=self._run, name="ahead", daemon=True)

    def start(self) -> None:
        """Read ahead from now on, on a thread that `close` ends."""
        self._thread.start()

    def close(self) -> None:
        """End the thread, after the reading that may be under way."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def page(self, text: Text) -> bytes:
        """All metrics in a format. What was read ahead serves once, as later ones ask for what is newer."""
        arrived = self._clock()
        with self._changed:
            page, self._ready = self._ready, None
            if not page or page.text is not text or self._clock() - page.read_at > OLDEST_SECONDS:
                page = self._read(text)
            self._arrivals.append(arrived)
            coming = expected(self._arrivals)
            lead = min(max(_LEAD * self._took, _LEAST_LEAD_SECONDS), _MOST_LEAD_SECONDS)
            self._due = None if coming is None else (coming - lead, text)
            self._changed.notify()
        self._metrics.note_age(self._clock() - page.read_at)
        return page.content

    def turn(self) -> float | None:
        """Read, if it is time to; for how long nothing is to be done then, None: until somebody asks."""
        if self._due is None:
            return None
        at, text = self._due
        left = at - self._clock()
        if left > 0:
            return left
        self._due, self._ready = None, self._read(text)
        return None

    def _read(self, text: Text) -> _Page:
        begun = self._clock()
        families, read_at = self._metrics.look()
        page = _Page(text, text.write(families), read_at)
        self._took = self._clock() - begun
        return page

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                self._changed.wait(self.turn())
