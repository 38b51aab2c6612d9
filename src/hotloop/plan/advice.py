"""Whether spot machines pay for a training, how far apart it should save, and what may come of it."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hotloop.core.save_interval import daly_interval, young_interval
from hotloop.plan.lifetime import Empirical, First, Lifetime, Weibull, fitted
from hotloop.plan.replay import Life, Replayed, bands, observed
from hotloop.plan.spot import Costs, Outlook, Price, best_interval, outlook, price

_ENOUGH = 10
"""Losses from which on a distribution is taken as it was observed; of fewer, a Weibull distribution is fitted."""
_CURVE = 60
_PARTS, _PARTS_LOSSES = 8, 16
"""Into which a trace is divided to see how far its times differ, and losses that it takes: two in each."""
_NINE_IN_TEN = 1.895
"""Of Student's distribution with seven degrees of freedom: within so many deviations, up or down."""


@dataclass(frozen=True)
class Asked:
    """What is asked.

    Attributes:
        mean, shape: of the lifetime of one machine, in seconds, where there are no `lives`.
        lives: what was observed of machines.
        machines: that train together; `together`: share of the losses that take all of them.
        interval: seconds between saves; 0: the best that is known.
        spot, on_demand: prices of one machine's hour; 0: not known.
        work: seconds of it, on all machines; 0: not known.
    """

    costs: Costs
    mean: float = 0.0
    shape: float = 1.0
    lives: tuple[Life, ...] = ()
    machines: int = 1
    together: float = 0.0
    interval: float = 0.0
    spot: float = 0.0
    on_demand: float = 0.0
    work: float = 0.0


@dataclass(frozen=True)
class Advice:
    """What is found. Times in seconds; prices are of all machines.

    Attributes:
        lifetime: how one machine's is described.
        mean: of one machine; `first`: until the first of all is lost.
        young, daly: intervals by these formulae, which know no restarts and risks that stay the same.
        curve: intervals, and the share of the paid time that is work.
        wall, paid: that the work is expected to take, and that is paid for; None where it is not known, or never ends.
        cost: of that; None where that or a price is not known.
        waste_low, waste_high: share of the paid time that is no work, in nine of ten futures that are as long as what
            was observed, and differ from it as its own parts differ; None where too little was observed.
        low, middle, high: of trainings played through: by wall time the 5th, 50th and 95th of a hundred.
    """

    lifetime: str
    mean: float
    first: float
    outlook: Outlook
    young: float
    daly: float
    curve: tuple[tuple[float, float], ...]
    price: Price | None
    wall: float | None
    paid: float | None
    cost: float | None
    waste_low: float | None
    waste_high: float | None
    low: Replayed | None
    middle: Replayed | None
    high: Replayed | None


def advise(asked: Asked) -> Advice:
    """Some 300 intervals, each in about a millisecond; nine times as many if there are `lives`."""
    described, one = _lifetime(asked)
    group = _group(asked, one)
    best = _best(asked, group)
    cost = None
    if asked.spot and asked.on_demand:
        cost = price(asked.spot * asked.machines, asked.on_demand * asked.machines, best)
    played: Sequence[Replayed | None] = (None, None, None)
    if asked.work and asked.lives and asked.machines == 1:
        played = bands(asked.lives, asked.work, best.interval, asked.costs)
    first = group.mean
    waste_low, waste_high = _waste(asked, best)
    wall = asked.work / best.share if asked.work and best.share else None
    paid = asked.work / best.paid_share if asked.work and best.paid_share else None
    return Advice(
        lifetime=described, mean=one.mean, first=first, outlook=best,
        young=young_interval(asked.costs.save, first), daly=daly_interval(asked.costs.save, first),
        curve=_curve(group, best.interval, asked.costs), price=cost, wall=wall, paid=paid,
        cost=paid / 3600 * asked.spot * asked.machines if paid and asked.spot else None,
        waste_low=waste_low, waste_high=waste_high, low=played[0], middle=played[1], high=played[2],
    )  # fmt: skip


def _group(asked: Asked, one: Lifetime) -> Lifetime:
    return First(one, asked.machines, asked.together) if asked.machines > 1 else one


def _best(asked: Asked, group: Lifetime) -> Outlook:
    if asked.interval:
        return outlook(group, asked.interval, asked.costs)
    best = best_interval(group, asked.costs)
    if not asked.lives or _wastes_less(asked):
        return best
    young = outlook(group, young_interval(asked.costs.save, group.mean), asked.costs)
    return young if young.paid_share else best


def _wastes_less(asked: Asked) -> bool:
    """Whether, on average over a trace's parts, a plan from the others wastes less in one than Young's interval.

    Of 72 plans for the second halves of public traces none did worse than Young's then; without this judgement 4 did.
    """
    if sum(life.ended for life in asked.lives) < _PARTS_LOSSES:
        return False
    parts = _parts(asked.lives)
    gained = 0.0
    for number, part in enumerate(parts):
        others = tuple(life for other, lives in enumerate(parts) if other != number for life in lives)
        known = _group(asked, _lifetime(replace(asked, lives=others))[1])
        there = _group(asked, _lifetime(replace(asked, lives=part))[1])
        planned = outlook(there, best_interval(known, asked.costs).interval, asked.costs)
        gained += planned.paid_share
        gained -= outlook(there, young_interval(asked.costs.save, known.mean), asked.costs).paid_share
    return gained > 0


def _waste(asked: Asked, best: Outlook) -> tuple[float, float] | tuple[None, None]:
    """As the mean of as many parts again differs from the mean of these, in the logarithm."""
    if sum(life.ended for life in asked.lives) < _PARTS_LOSSES:
        return None, None
    logs = []
    for part in _parts(asked.lives):
        lifetime = _group(asked, _lifetime(replace(asked, lives=part))[1])
        logs.append(math.log(1 - outlook(lifetime, best.interval, asked.costs).paid_share))
    factor = math.exp(_NINE_IN_TEN * statistics.stdev(logs) * math.sqrt(2 / _PARTS))
    waste = 1 - best.paid_share
    return waste / factor, min(1.0, waste * factor)


def _parts(lives: Sequence[Life]) -> list[tuple[Life, ...]]:
    """One after another, with about as many losses in each."""
    losses = sum(life.ended for life in lives)
    parts: list[list[Life]] = [[] for _ in range(_PARTS)]
    before = 0
    for life in lives:
        parts[min(_PARTS - 1, before * _PARTS // losses)].append(life)
        before += life.ended
    return [tuple(part) for part in parts]


def _lifetime(asked: Asked) -> tuple[str, Lifetime]:
    if not asked.lives:
        risk = "whose risk stays" if asked.shape == 1 else f"of Weibull's shape {asked.shape:g}"
        return f"a mean, {risk}", Weibull.of_mean(asked.mean, asked.shape)
    machines = observed(asked.lives)
    lost = {one.seconds for one in machines if one.ended}
    if len(lost) >= _ENOUGH:
        return f"as observed, {sum(one.ended for one in machines)} losses", Empirical(machines)
    if len(lost) < 2:
        total, losses = sum(one.seconds for one in machines), sum(one.ended for one in machines)
        described = "one loss" if losses == 1 else f"{losses} losses of one age"
        return f"{described} observed, whose risk stays", Weibull(total / losses)
    found = fitted(machines)
    return f"fitted to {sum(one.ended for one in machines)} losses, Weibull's shape {found.shape:.2g}", found


def _curve(lifetime: Lifetime, best: float, costs: Costs) -> tuple[tuple[float, float], ...]:
    intervals = [best * 30 ** (2 * step / (_CURVE - 1) - 1) for step in range(_CURVE)]
    return tuple((one, outlook(lifetime, one, costs).paid_share) for one in intervals)
