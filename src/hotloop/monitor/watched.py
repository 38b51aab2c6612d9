"""A host as it is watched: its cards and jobs, how fast steps are lately, and what stands out."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from hotloop.core.errors import HotloopError
from hotloop.core.live import Live
from hotloop.core.units import format_seconds
from hotloop.monitor.history import History, busy, longer, of_card
from hotloop.monitor.reading import Card, Host

_SILENT_SECONDS = 120.0
_NOTHING = 9
_WAITING, _IDLE = 0.2, 0.5
"""Shares: of a step spent waiting for data, and of a busy card, from which on they are worth a word."""


@dataclass(frozen=True)
class Job:
    """A process that trains, as it was lately.

    Attributes:
        card: that it trains on; None on a CPU, or where the card is not told.
        step_seconds, wait_share, samples_per_second: between the last two looks in which it did steps; None before.
        recent: its own lines, at the last looks in which it did steps.
        silent_seconds: since its last sign of life.
        verdict: what stands out, and what to type; "" if nothing does.
        urgency: of the verdict: 0 is worst.
    """

    live: Live
    card: Card | None
    step_seconds: float | None
    wait_share: float | None
    samples_per_second: float | None
    recent: History
    silent_seconds: float
    verdict: str
    urgency: int


@dataclass(frozen=True)
class View:
    """What one look found.

    Attributes:
        recent: lines of cards, by UUID.
    """

    cards: tuple[Card, ...]
    jobs: tuple[Job, ...]
    driver: str
    seconds: float
    recent: Mapping[str, History] = field(default_factory=dict)


class Watched:
    """Looks at a host again and again. Not for several threads."""

    def __init__(
        self, host: Host, clock: Callable[[], float] = time.monotonic, now: Callable[[], float] = time.time
    ) -> None:
        self._host, self._clock, self._now = host, clock, now
        self._before: dict[tuple[str, str, int], Job] = {}
        self._recent: dict[str, History] = {}

    def look(self) -> View:
        """Read the host once.

        Raises:
            HotloopError: it cannot be read.
        """
        begun = self._clock()
        cards = self._host.cards()
        try:
            lives = self._host.jobs().jobs
        except OSError as error:
            what = f"{error.filename} cannot be read"
            raise HotloopError(what, error.strerror or str(error), "HOTLOOP_LIVE=FOLDER hotloop watch") from error
        by_uuid = {card.uuid: card for card in cards.cards}
        jobs = tuple(self._job(live, by_uuid.get(live.gpu)) for live in lives)
        there = {_key(live) for live in lives}
        for gone in self._before.keys() - there:
            del self._before[gone]
        self._recent = {uuid: longer(self._recent.get(uuid, {}), of_card(card)) for uuid, card in by_uuid.items()}
        driver = cards.driver.version if cards.driver else ""
        return View(tuple(cards.cards), jobs, driver, self._clock() - begun, self._recent)

    def _job(self, live: Live, card: Card | None) -> Job:
        key = _key(live)
        before = self._before.get(key)
        if before and live.steps < before.live.steps:  # it was started again
            before = None
        self._before[key] = job = self._since(before, live, card)
        return job

    def _since(self, before: Job | None, live: Live, card: Card | None) -> Job:
        """As it was since the look before; where it has done no step since, as it was then."""
        past = before.live if before else Live(0, 0, 0, way="", job="")
        steps, seconds = live.steps - past.steps, live.step_seconds - past.step_seconds
        recent = before.recent if before else {}
        step_seconds = before.step_seconds if before else None
        wait_share = before.wait_share if before else None
        rate = before.samples_per_second if before else None
        if steps and seconds:
            step_seconds = seconds / steps
            wait_share = (live.wait_seconds - past.wait_seconds) / seconds
            rate = (live.samples - past.samples) / seconds or None
            recent = longer(recent, {"step time": step_seconds, "wait": wait_share, "loss": live.loss})
        silent = max(0.0, self._now() - live.heartbeat)
        urgency, verdict = next(_found(live, card, wait_share, silent), (_NOTHING, ""))
        return Job(
            live=live, card=card, step_seconds=step_seconds, wait_share=wait_share,
            samples_per_second=rate, recent=recent, silent_seconds=silent, verdict=verdict, urgency=urgency,
        )  # fmt: skip


def _key(live: Live) -> tuple[str, str, int]:
    return live.job, live.run, live.rank


def _found(live: Live, card: Card | None, wait_share: float | None, silent_seconds: float) -> Iterator[tuple[int, str]]:
    """What stands out, the worst first. Who validates, saves or begins may be slow."""
    trains = live.phase in ("step", "loading")
    if card and not card.answers:
        yield 0, f"GPU {card.index} does not answer: hotloop doctor"
    if trains and silent_seconds > _SILENT_SECONDS:
        yield 1, f"no sign of life for {format_seconds(silent_seconds)}: it may hang"
    held = [reason.replace("_", " ") for reason, on in card.throttled.items() if on] if card else []
    if card and any(word in reason for reason in held for word in ("thermal", "slowdown", "brake")):
        yield 2, f"GPU {card.index} is held down: {', '.join(held)}: hotloop doctor"
    if trains and wait_share is not None and wait_share > _WAITING:
        yield 3, f"waits for data in {wait_share:.0%} of its time: hotloop profile names the cause"
    share = busy(card) if card else None
    if trains and share is not None and share < _IDLE:
        yield 4, f"its GPU is busy for {share:.0%} and data is there: hotloop profile names the cause"
