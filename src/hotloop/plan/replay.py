"""A training over what interruptions have really been: traces of when machines were there."""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from hotloop.core.errors import InputError
from hotloop.plan.lifetime import Observed
from hotloop.plan.spot import Costs

_MOST_LIVES = 1_000_000
_ENDED = {"0": False, "1": True}


@dataclass(frozen=True)
class Life:
    """A machine that was there from one moment to another, in seconds; `ended`: it was taken away."""

    start: float
    end: float
    ended: bool = True


def read_trace(file: Path) -> list[Life]:
    """Read a CSV file with the columns start and end, and if need be ended (0 or 1), in order.

    Times are seconds, or dates as ISO 8601 has them, of UTC where they name no zone.

    Raises:
        InputError: it cannot be read, a line is not of that form, or machines overlap.
    """
    example = "a CSV file: start,end then 2026-01-05T08:00,2026-01-05T19:30, a line for each machine"
    try:
        with file.open(newline="", encoding="utf-8-sig") as opened:
            rows = list(csv.DictReader(opened))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{file} cannot be read", getattr(error, "strerror", None) or str(error), example) from None
    lives: list[Life] = []
    for number, row in enumerate(rows, 2):
        try:
            life = Life(_seconds(row["start"]), _seconds(row["end"]), _ENDED[(row.get("ended") or "1").strip()])
        except (KeyError, TypeError, ValueError, AttributeError):
            raise InputError(
                f"{file}, line {number}: no start and end, or ended is neither 0 nor 1", str(dict(row)), example
            ) from None
        if life.end <= life.start or (lives and life.start < lives[-1].end):
            raise InputError(
                f"{file}, line {number}: from {row['start']} to {row['end']}",
                "each machine ends after it begins, and begins after the one before has ended", "sort the lines",
            )  # fmt: skip
        lives.append(life)
    if not any(life.ended for life in lives):
        raise InputError(f"{file} has no interruption", f"{len(lives)} machines, none of which was lost", example)
    return lives


def observed(lives: Sequence[Life]) -> list[Observed]:
    """How long each lived."""
    return [Observed(life.end - life.start, life.ended) for life in lives]


@dataclass(frozen=True)
class Replayed:
    """One training. Seconds, from its begin to its end.

    Attributes:
        paid: in which a machine was there for it.
    """

    wall: float
    paid: float
    interruptions: int


def replay(lives: Sequence[Life], work: float, interval: float, costs: Costs, start: float) -> Replayed:
    """Train for so many seconds of work from a moment on; after the trace's end it begins anew."""
    period = lives[-1].end - lives[0].start
    paid, left, interruptions = 0.0, work, 0
    first = next((number for number, life in enumerate(lives) if life.end > start), 0)
    begin = start
    for place in range(first, first + _MOST_LIVES):
        life = lives[place % len(lives)]
        shift = place // len(lives) * period
        begin, end = max(begin, life.start + shift), life.end + shift
        if end <= begin:  # it came and went while a machine was waited for
            continue
        needed = costs.restart + left + costs.save * math.ceil(left / interval)
        if end - begin >= needed or (not life.ended and place + 1 == len(lives)):
            return Replayed(begin + needed - start, paid + needed, interruptions)
        left -= _saved(end - begin - costs.restart, interval, costs)
        paid += end - begin
        begin = end + costs.wait
        interruptions += 1
    raise InputError("the training never ends", f"{left:.0f} of {work:.0f} s are left", "a trace with longer lives")


def bands(
    lives: Sequence[Life], work: float, interval: float, costs: Costs, starts: int = 200, seed: int = 0
) -> tuple[Replayed, Replayed, Replayed]:
    """Trainings from random moments of the trace: by their wall time the 5th, 50th and 95th of a hundred."""
    moments = np.random.default_rng(seed).uniform(lives[0].start, lives[-1].end, starts)
    played = (replay(lives, work, interval, costs, float(moment)) for moment in moments)
    found = sorted(played, key=lambda one: one.wall)
    low, middle, high = (found[round(share * (starts - 1))] for share in (0.05, 0.5, 0.95))
    return low, middle, high


def _saved(there: float, interval: float, costs: Costs) -> float:
    """Work that counts of a machine that was there for so long after its restart; on average, noticed or not."""
    saves, rest = divmod(max(0.0, there), interval + costs.save)
    since = min(interval, max(0.0, rest - costs.save))
    return saves * interval + costs.noticed * since


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        moment = datetime.fromisoformat(text.strip())
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    if not math.isfinite(value):
        raise ValueError(text)
    return value
