"""Two profiles side by side, and conditions on what changed."""

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from math import hypot, isfinite, nan

from hotloop.core.errors import InputError
from hotloop.core.profile import KINDS, Profile

_CONDITION = re.compile(r"\s*([a-z_.]+)\s*(<=|>=|<|>)\s*([0-9.eE+-]+)\s*(x|%)?\s*")
_COMPARED: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


@dataclass(frozen=True)
class Change:
    """One figure of two profiles.

    Attributes:
        name: such as "step_seconds" or "shares.input".
        spread: error of the ratio; 0 if unknown.
    """

    name: str
    before: float
    after: float
    spread: float = 0.0

    @property
    def ratio(self) -> float:
        """After over before; 1 if both are 0."""
        return self.after / self.before if self.before else (1.0 if not self.after else float("inf"))


def compare(before: Profile, after: Profile) -> list[Change]:
    """What changed: a step's time, then where it goes."""
    ratio = after.step_seconds.mean / before.step_seconds.mean
    spread = ratio * hypot(*(one.step_seconds.error / one.step_seconds.mean for one in (before, after)))
    changes = [Change("step_seconds", before.step_seconds.mean, after.step_seconds.mean, spread)]
    seconds = [
        Change(f"{kind}_seconds", *(one.shares[kind] * one.step_seconds.mean for one in (before, after)))
        for kind in KINDS
    ]
    shares = [Change(f"shares.{kind}", before.shares[kind], after.shares[kind]) for kind in KINDS]
    return [*changes, *seconds, *shares]


def is_met(condition: str, changes: list[Change]) -> bool:
    """Whether a condition holds, such as "step_seconds > 1.05x" (of before), "shares.input > 0.2" or "10%".

    Raises:
        InputError: it is not of that form, or names no figure.
    """
    match = _CONDITION.fullmatch(condition)
    fix = "--fail-if 'step_seconds > 1.05x'"
    if not match:
        raise InputError(
            f"--fail-if {condition!r}", "a figure, a comparison and a number are needed, x after it for ratios", fix
        )
    name, sign, number, unit = match.groups()
    change = next((one for one in changes if one.name == name), None)
    if change is None:
        raise InputError(f"--fail-if {condition!r}", f"figures are {', '.join(one.name for one in changes)}", fix)
    try:
        limit = float(number)
    except ValueError:
        limit = nan
    if not isfinite(limit):  # as 1e400 is not
        raise InputError(f"--fail-if {condition!r}", f"{number} is no number", fix)
    if unit == "%" and not name.startswith("shares."):
        cause = "% is of a step, and so of shares only; a ratio of after to before has x after it"
        raise InputError(f"--fail-if {condition!r}", cause, fix)
    value = change.ratio if unit == "x" else change.after
    return _COMPARED[sign](value, limit / 100 if unit == "%" else limit)
