"""How long a machine lives until it is taken away."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]


class Lifetime(Protocol):
    """A distribution of seconds."""

    @property
    def mean(self) -> float:
        """In seconds."""

    def survival(self, seconds: Times) -> Times:
        """The share that lives longer."""


@dataclass(frozen=True)
class Weibull:
    """Machines whose risk falls with age (shape < 1), stays (1: exponential) or rises (> 1).

    Attributes:
        scale: seconds after which 63 % are gone.
    """

    scale: float
    shape: float = 1.0

    @classmethod
    def of_mean(cls, mean: float, shape: float = 1.0) -> "Weibull":
        """With a mean in seconds."""
        return cls(mean / math.gamma(1 + 1 / shape), shape)

    @property
    def mean(self) -> float:
        return self.scale * math.gamma(1 + 1 / self.shape)

    def survival(self, seconds: Times) -> Times:
        """exp(-(t / scale)^shape)."""
        with np.errstate(over="ignore"):  # lifetimes that hardly differ have a large shape: nobody lives that long
            found: Times = np.exp(-((np.maximum(seconds, 0.0) / self.scale) ** self.shape))
        return found


@dataclass(frozen=True)
class Observed:
    """One machine.

    Attributes:
        seconds: for which it was there.
        ended: whether it was taken away; else it was given back, or is still there.
    """

    seconds: float
    ended: bool = True


class Empirical:
    """What was observed, as it is; after the longest observation at the mean risk of all.

    Source: E. L. Kaplan, P. Meier, "Nonparametric estimation from incomplete observations", JASA 53, 1958.

    Args:
        machines: at least one of which was taken away.
    """

    def __init__(self, machines: Sequence[Observed]) -> None:
        ends = sorted({one.seconds for one in machines if one.ended})
        self._risk = sum(one.ended for one in machines) / sum(one.seconds for one in machines)
        left, self._times, self._shares = 1.0, [0.0], [1.0]
        for end in ends:
            there = sum(one.seconds >= end for one in machines)
            left *= 1 - sum(one.ended and one.seconds == end for one in machines) / there
            self._times.append(end)
            self._shares.append(left)
        self._last = max(one.seconds for one in machines)

    @property
    def mean(self) -> float:
        times = np.array([*self._times, self._last])
        return float(np.sum(np.diff(times) * np.array(self._shares)) + self._shares[-1] / self._risk)

    def survival(self, seconds: Times) -> Times:
        """The share that lives longer."""
        places = np.searchsorted(self._times, seconds, side="right") - 1
        shares = np.array(self._shares)[np.maximum(places, 0)]
        found: Times = shares * np.exp(-self._risk * np.maximum(0.0, seconds - self._last))
        return found


def fitted(machines: Sequence[Observed]) -> Weibull:
    """The likeliest Weibull distribution, machines that are still there counted as such.

    Source: A. C. Cohen, "Maximum likelihood estimation in the Weibull distribution based on complete and on censored
    samples", Technometrics 7(4), 1965.

    Args:
        machines: at least two of which were taken away, after different times.
    """
    times = np.array([one.seconds for one in machines])
    scale = float(times.max())
    logs = np.log(times / scale)  # powers of large shapes stay within range
    ended = np.array([one.ended for one in machines])
    mean_log = float(logs[ended].mean())

    def slope(shape: float) -> float:
        weights = np.exp(shape * logs)
        return float((weights * logs).sum() / weights.sum()) - 1 / shape - mean_log

    low, high = 1e-3, 1e3
    for _ in range(200):  # slope rises with shape
        middle = math.sqrt(low * high)
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    shape = math.sqrt(low * high)
    power = float(np.exp(shape * logs).sum()) / int(ended.sum())
    return Weibull(scale * power ** (1 / shape), shape)


@dataclass(frozen=True)
class First:
    """The first loss among several machines that train together.

    Attributes:
        of: each of them.
        machines: how many.
        together: share of the losses that take all of them at once, as one zone runs out of machines.
    """

    of: Lifetime
    machines: int
    together: float

    @cached_property
    def mean(self) -> float:
        times = np.concatenate([[0.0], np.geomspace(1e-15, 1e6, 40_000) * self.of.mean])
        return float(np.trapezoid(self.survival(times), times))

    def survival(self, seconds: Times) -> Times:
        """Each machine's risk counts once for what takes all, and once for each machine for what does not."""
        found: Times = self.of.survival(seconds) ** (self.together + self.machines * (1 - self.together))
        return found
