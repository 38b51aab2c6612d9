"""What a scrape gets: a reading of the host as metrics, and what the exporter says of itself."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Lock

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from hotloop import __version__
from hotloop.monitor.families import Family, card_families, job_families
from hotloop.monitor.reading import CardsReading, Host, JobsReading

FRESH_SECONDS = 0.5
_IGNORED = ("foreign", "damaged", "ended", "duplicate")


@dataclass(frozen=True)
class _Reading:
    cards: CardsReading
    jobs: JobsReading
    seconds: dict[str, float]


class Metrics(Collector):
    """Metrics of a host, read when they are asked for; what was read half a second ago serves again. For any thread.

    Nothing is kept of jobs: what has ended is gone at the next scrape.
    """

    def __init__(
        self, host: Host, clock: Callable[[], float] = time.monotonic, now: Callable[[], float] = time.time
    ) -> None:
        self._host, self._clock, self._now = host, clock, now
        self._reading_lock, self._lock = Lock(), Lock()
        self._reading: _Reading | None = None
        self._read_at = 0.0
        self._failures = Counter({"cards": 0, "jobs": 0})
        self._last: dict[str, float] = {}
        self._requests: Counter[str] = Counter()
        self._refused = 0
        self._pushes: Counter[str] = Counter()
        self._pushed = 0.0
        self._age: float | None = None

    def collect(self) -> Iterator[Metric]:
        """All metrics, as prometheus_client has them."""
        for family in self.families():
            yield family.metric()

    def families(self) -> Iterator[Family]:
        """All metrics that have a value."""
        return self.look()[0]

    def look(self) -> tuple[Iterator[Family], float]:
        """All metrics that have a value, and when they had been read, by the clock."""
        with self._reading_lock:
            if self._reading is None or self._clock() - self._read_at >= FRESH_SECONDS:
                self._reading = self._read()
                self._read_at = self._clock()
            reading, read_at = self._reading, self._read_at
        return self._all(reading), read_at

    def note_age(self, seconds: float) -> None:
        """An answer held what was read so long before."""
        with self._lock:
            self._age = seconds

    def count_request(self, code: int) -> None:
        """A request was answered."""
        with self._lock:
            self._requests[str(code)] += 1

    def count_refused(self) -> None:
        """A password was wrong."""
        with self._lock:
            self._refused += 1

    def count_push(self, ok: bool) -> None:
        """All were sent to a collector, or not."""
        with self._lock:
            self._pushes.update(sent=int(ok), failed=int(not ok))
            self._pushed = self._now() if ok else self._pushed

    def _all(self, reading: _Reading) -> Iterator[Family]:
        yield from card_families(reading.cards)
        yield from job_families(reading.jobs)
        yield from self._own(reading)

    def _read(self) -> _Reading:
        begun = self._clock()
        cards = self._host.cards()
        between = self._clock()
        failed = False
        try:
            jobs = self._host.jobs()
        except OSError:
            jobs, failed = JobsReading(), True
        ended = self._clock()
        with self._lock:
            self._failures["cards"] += cards.failures
            self._failures["jobs"] += failed
            if cards.driver or not cards.failures:
                self._last["cards"] = self._now()
            if not failed:
                self._last["jobs"] = self._now()
        return _Reading(cards, jobs, {"cards": between - begun, "jobs": ended - between})

    def _own(self, reading: _Reading) -> Iterator[Family]:
        with self._lock:
            failures, last, requests = dict(self._failures), dict(self._last), dict(self._requests)
            refused, pushes, pushed, age = self._refused, dict(self._pushes), self._pushed, self._age
        ignored = {reason: reading.jobs.ignored.get(reason, 0) for reason in _IGNORED}
        for name, words, label, values in (
            ("build_info", "This exporter.", "version", {__version__: 1.0}),
            ("collect_duration_seconds", "Time that the last reading took.", "source", reading.seconds),
            ("collect_failures_total", "Readings that failed; of cards, one for each card.", "source", failures),
            ("last_collect_timestamp_seconds", "When the source was last read, since 1970.", "source", last),
            ("requests_total", "Requests by the answer's code.", "code", requests),
            ("otlp_pushes_total", "Times that all was sent to a collector, by what came of it.", "result", pushes),
            ("jobs_ignored", "Processes that were left out, by reason.", "reason", ignored),
        ):
            rows = [((key,), value) for key, value in values.items()]
            if rows:
                yield Family(f"exporter_{name}", words, (label,), rows)
        if age is not None:
            yield Family("exporter_answer_age_seconds", "Age of what the answer before held.", (), [((), age)])
        if pushed:
            words = "When all was last sent to a collector, since 1970."
            yield Family("exporter_otlp_last_push_timestamp_seconds", words, (), [((), pushed)])
        yield Family("exporter_authentication_failures_total", "Wrong passwords.", (), [((), refused)])
