"""What a step takes in the long run, by the times of some of them and the batches that were ready before and after.

Worker processes go on making batches while a script does something else: compiling, starting a trial, validating. Steps
that use up this stock are faster than any that follow. Where workers have no pause and yet the stock has shrunk, they
make too few: then a step takes in the long run as long as they need for its batches. In any other window it takes as
long as it was seen to take. So it is the slower of making and consuming in both.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot, sqrt
from statistics import fmean, median, stdev

_FAR, _FEW = 5.0, 0.06
"""Steps so many times as long as most are left out of a mean, if they are so few of all: workers that give their
batches by turns make many of them long.
"""
_CERTAIN = 2.0
"""Standard errors by which a stock must have shrunk: its size goes up and down by itself, too."""


@dataclass(frozen=True)
class Step:
    """One step of the script.

    Attributes:
        waited: seconds of it for batches.
    """

    seconds: float
    waited: float


@dataclass(frozen=True)
class Stock:
    """The batches of a pass over a loader at one time.

    Attributes:
        ready: made, and not taken by the script yet.
        under_way: given to workers, and not made yet.
        taken: by the script so far.
        workers: that make them.
        number: of the pass; in another one all workers have begun anew.
    """

    ready: int = 0
    under_way: int = 0
    taken: int = 0
    workers: int = 0
    number: int = 0

    @property
    def idle(self) -> int:
        """Workers that have nothing to do: all that they may make ahead is made, or all of the pass is."""
        return max(0, self.workers - self.under_way)


@dataclass(frozen=True)
class Window:
    """Steps in a row.

    Attributes:
        before: the stock when they began.
        after: when they had ended.
    """

    steps: tuple[Step, ...]
    before: Stock = Stock()
    after: Stock = Stock()


@dataclass(frozen=True)
class Mean:
    """Of some steps.

    Attributes:
        error: standard error.
        waits: share of them in which the script waited for batches.
    """

    seconds: float
    error: float
    waits: float

    def over(self, other: "Mean") -> tuple[float, float]:
        """The ratio of this one to another, and its standard error."""
        ratio = self.seconds / other.seconds
        return ratio, ratio * hypot(self.error / self.seconds, other.error / other.seconds)


def agreed(shares: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Of ratios in a row, with their standard errors, the middle one: where the machine's pace has changed once, the
    others agree. What the nearest of them is away from it may be the error.
    """
    middle, error = sorted(shares)[len(shares) // 2]
    apart = sorted(abs(share - middle) for share, _ in shares)
    return middle, max([error, *apart[1:2]])


def enough(number: int, stock: Stock) -> int:
    """Steps for a window, so many at least: half of its batches are made in it, and each worker has as many turns."""
    workers = max(1, stock.workers)
    return -(-max(number, 2 * stock.ready) // workers) * workers


def mean_of(window: Window) -> Mean:
    """What a step takes in the long run."""
    steps = _usual(window.steps)
    seconds, number = fmean(step.seconds for step in steps), len(steps)
    waits = sum(step.waited for step in steps) / number / seconds
    error = stdev(step.seconds for step in steps) / sqrt(number) if number > 1 else 0.0
    taken = window.after.taken - window.before.taken
    made = max(1, taken - _used(window.before, window.after))  # none: a step takes that long at least
    if made >= taken:
        return Mean(seconds, error, waits)
    longer = taken / made
    pace = seconds * longer
    error = hypot(error * longer, pace * window.after.workers / sqrt(6) / made)  # as if all had their batches at once
    return Mean(pace, error, 1 - (1 - waits) / longer)  # what is added is waiting


def _used(before: Stock, after: Stock) -> int:
    """Batches by which a stock has shrunk since, in which no worker had a pause; 0 if that is not certain."""
    if before.number != after.number or after.idle:
        return 0
    used = before.ready - before.idle - after.ready  # what the idle ones had too many was no sign of their pace
    # At both times each worker has some part of a batch in hand: two numbers between 0 and 1.
    return used if used > _CERTAIN * sqrt(after.workers / 6) else 0


def _usual(steps: Sequence[Step]) -> Sequence[Step]:
    """Without the few in which something else was done, validation or saving say."""
    limit = _FAR * median(step.seconds for step in steps)
    usual = [step for step in steps if step.seconds <= limit]
    return usual if len(usual) >= (1 - _FEW) * len(steps) else steps
