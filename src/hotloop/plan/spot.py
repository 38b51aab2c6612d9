"""Training on machines that may be taken away: how much of the time is work, and what that may cost."""

from dataclasses import dataclass

import numpy as np

from hotloop.plan.lifetime import Lifetime

_MOST_CYCLES = 100_000
_INTERVALS = 240
_FINE = 4_000
_NEVER = 1e-9
"""Share of the time: what is less work than this is none."""


@dataclass(frozen=True)
class Costs:
    """What saving and starting again take, in seconds.

    Attributes:
        save: for which training waits for a checkpoint.
        restart: from a new machine's begin, which is paid for, until it trains on.
        wait: until there is a new machine; nothing is paid meanwhile.
        noticed: share of the interruptions that are told early enough to save once more.
    """

    save: float
    restart: float = 0.0
    wait: float = 0.0
    noticed: float = 0.0


@dataclass(frozen=True)
class Outlook:
    """What becomes of the time.

    Attributes:
        interval: seconds of work between two saves.
        paid_share: of the time that is paid for, which is work that counts.
        share: of all time, waiting for machines included.
        lost_share, save_share, restart_share: of the time that is paid for: work that is done again, saves, restarts.
    """

    interval: float
    paid_share: float
    share: float
    lost_share: float
    save_share: float
    restart_share: float


def outlook(lifetime: Lifetime, interval: float, costs: Costs) -> Outlook:
    """What comes of a machine's life on average, by the share of machines that reach each save.

    Work counts from a save on: of machines that are lost without notice, up to the last save; with notice, all. A life
    begins with a restart, whose time a machine that dies within it has cost, too.
    """
    mean = lifetime.mean
    cycle = interval + costs.save
    reached = _reached(lifetime, costs.restart, cycle)
    saved, saves = interval * reached, costs.save * reached
    begun = mean - _lived(lifetime, costs.restart)  # time after the restart
    told = (mean - _lived(lifetime, costs.restart + costs.save)) * interval / cycle
    useful = (1 - costs.noticed) * saved + costs.noticed * max(told, saved)
    if useful < _NEVER * mean:
        useful = 0.0
    saving = (1 - costs.noticed) * saves + costs.noticed * (begun - max(told, saved))
    restarts = mean - begun
    return Outlook(
        interval=interval,
        paid_share=useful / mean,
        share=useful / (mean + costs.wait),
        lost_share=max(0.0, mean - useful - saving - restarts) / mean,
        save_share=saving / mean,
        restart_share=restarts / mean,
    )


def best_interval(lifetime: Lifetime, costs: Costs) -> Outlook:
    """The interval with which most of the time is work, to 3 %."""
    mean = lifetime.mean
    shortest = max(costs.save / 10, mean * 1e-4)
    tried = np.geomspace(shortest, max(2 * mean, 2 * shortest), _INTERVALS)
    return max((outlook(lifetime, float(one), costs) for one in tried), key=lambda found: found.paid_share)


@dataclass(frozen=True)
class Price:
    """Of an hour of all machines, in any currency.

    Attributes:
        useful_hour: what an hour of work that counts costs on spot machines.
        on_demand_hour: the same on machines that stay.
        ceiling: the spot price at which both cost the same; a bid above it does not pay.
        saving: share of the cost that spot machines save; below 0 they cost more.
    """

    useful_hour: float
    on_demand_hour: float
    ceiling: float
    saving: float


def price(spot: float, on_demand: float, found: Outlook, stays: Outlook | None = None) -> Price:
    """What work costs.

    Args:
        spot, on_demand: of a paid hour.
        stays: of machines that are paid in full, if they fail, too; None: they do not, and nothing is saved there.
    """
    share = stays.paid_share if stays else 1.0
    useful, otherwise = spot / found.paid_share if found.paid_share else np.inf, on_demand / share
    return Price(float(useful), otherwise, otherwise * found.paid_share, float(1 - useful / otherwise))


def _reached(lifetime: Lifetime, restart: float, cycle: float) -> float:
    """Saves that a machine reaches on average."""
    cycles = int(min(_MOST_CYCLES, max(1.0, np.ceil(60 * lifetime.mean / cycle))))
    survival = lifetime.survival(restart + cycle * np.arange(1, cycles + 1, dtype=np.float64))
    found = float(survival.sum())
    if survival[-1] > _NEVER:  # where the risk falls with age, few machines live for a large part of the time
        rest = lifetime.mean - _lived(lifetime, restart + (cycles + 0.5) * cycle)
        found += max(0.0, rest) / cycle
    return found


def _lived(lifetime: Lifetime, until: float) -> float:
    """Seconds that a machine lives on average, what comes after so many not counted."""
    times = np.concatenate([[0.0], np.geomspace(1e-12, 1.0, _FINE)]) * until
    return float(np.trapezoid(lifetime.survival(times), times))
