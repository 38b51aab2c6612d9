"""Learning rates as functions of the step: no state, so resuming needs none."""

import math
from collections.abc import Callable

from hotloop.core.job import ScheduleSection
from hotloop.core.units import Interval

Schedule = Callable[[int], float]
"""Step number (from 0) -> factor of the highest learning rate."""


def make_schedule(section: ScheduleSection, steps: int, steps_per_epoch: int) -> Schedule:
    """The schedule of a job over `steps` steps.

    The learning rate rises linearly over the warm-up, then follows the curve. "one-cycle" is the curve of Smith and
    Topin, "Super-convergence" (2018): up over 30 % of the run from 1/25, along a cosine, and down along another.
    """
    warmup = warm_up_steps(section, steps, steps_per_epoch)

    def factor(step: int) -> float:
        if step < warmup:
            if section.name == "one-cycle":
                return _cosine(1 / 25, 1.0, step / warmup)
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, steps - warmup))
        match section.name:
            case "constant":
                return 1.0
            case "step":
                return float(section.factor ** (step // _steps(section.every, steps_per_epoch)))
            case "cosine" | "one-cycle":
                return _cosine(1.0, section.final, done)

    return factor


def warm_up_steps(section: ScheduleSection, steps: int, steps_per_epoch: int) -> int:
    """How long the learning rate rises, in a run over `steps` steps."""
    warmup = _steps(section.warmup, steps_per_epoch) if section.warmup else 0
    return warmup or (max(1, round(0.3 * steps)) if section.name == "one-cycle" else 0)


def _cosine(start: float, end: float, share: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * share)) / 2


def _steps(interval: Interval, steps_per_epoch: int) -> int:
    return int(interval.amount * (steps_per_epoch if interval.unit == "epochs" else 1))
