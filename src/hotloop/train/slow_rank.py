"""Which rank holds the others up: all wait for the slowest within a step, so that their own times tell nothing."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch

from hotloop.train.pieces import memory_errors
from hotloop.train.progress import Span
from hotloop.train.world import World

_APART_SECONDS = 60.0
"""Between two measurements."""
_SLOW = 0.8
"""Of the median of the others' rates. Cards of one kind differ by a few percent (H200s by 2 %)."""
_WAITS, _TIMES = 0.1, 3.0
"""Of its time, and so many times what the median rank waits."""


@dataclass(frozen=True)
class Pace:
    """What one rank does by itself.

    Attributes:
        rate: FLOP/s of a large matrix product; 0: not measured.
        wait_share: of its time without data.
    """

    rate: float
    wait_share: float


def slow_ranks(paces: Sequence[Pace]) -> dict[tuple[int, str], str]:
    """The ranks that others wait for, each with what holds it up: "rate" or "data"; and that in a line.

    Args:
        paces: by rank, at least two.
    """
    found = {}
    waits_beside = _without_each([pace.wait_share for pace in paces])
    measured = iter(_without_each([pace.rate for pace in paces if pace.rate]))
    for rank, pace in enumerate(paces):
        others, rates = waits_beside[rank], next(measured) if pace.rate else 0.0
        if 0 < pace.rate < _SLOW * rates:
            share = pace.rate / rates
            found[rank, "rate"] = f"rank {rank} multiplies matrices at {share:.2f} of the others' rate: its device is"
            found[rank, "rate"] += " throttled, or others use it (nvidia-smi -q -d PERFORMANCE)"
        if pace.wait_share > max(_WAITS, _TIMES * others):
            found[rank, "data"] = f"rank {rank} waits for data {100 * pace.wait_share:.0f} % of its time, the others"
            found[rank, "data"] += f" {100 * others:.0f} %: its reading holds all up"
    return found


def _without_each(values: Sequence[float]) -> list[float]:
    """The median of the others, for each; 0 for one alone. Sorted once, as all ranks do this for all."""
    order = np.argsort(values, kind="stable")
    place = np.empty(len(order), int)
    place[order] = np.arange(len(order))
    ranked, others = np.asarray(values)[order], len(order) - 1
    if others < 1:
        return [0.0] * len(order)
    low, high = (others - 1) // 2, others // 2  # their places among the others
    medians: list[float] = ((ranked[low + (low >= place)] + ranked[high + (high >= place)]) / 2).tolist()
    return medians


class SlowRanks:
    """Compares ranks whenever all of them are at the same point, and tells once of each that is slow twice in a row.

    Args:
        rate: measures this rank's rate in FLOP/s; called once a minute at most. None where ranks share processors, so
            that it would not be its own.
        warn: told in a line.
    """

    def __init__(self, world: World, rate: Callable[[], float] | None, warn: Callable[[str], None]) -> None:
        self._world = world
        self._measure = rate
        self._warn = warn
        self._measured = time.monotonic()
        self._since = Span()
        self._before: set[tuple[int, str]] = set()
        self._told: set[tuple[int, str]] = set()

    def add(self, span: Span) -> None:
        """Count what this rank has done."""
        self._since = self._since.plus(span)

    def compare(self) -> None:
        """All ranks call this at the same point, when none of them computes anything else."""
        if self._world.size == 1:
            return
        measures = self._world.from_first(time.monotonic() - self._measured >= _APART_SECONDS)
        rate = 0.0
        if measures:
            self._measured = time.monotonic()
            if self._measure:
                with suppress(torch.OutOfMemoryError), memory_errors():  # the training has all of the GPU
                    rate = self._measure()
        found = slow_ranks(self._world.gathered(Pace(rate, self._since.data_wait_share)))
        self._since = Span()
        for key in sorted(found.keys() & self._before - self._told):
            self._told.add(key)
            if self._world.first:
                self._warn(found[key])
        self._before = set(found) | {key for key in self._before if key[1] == "rate" and not measures}
