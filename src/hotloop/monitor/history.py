"""What a card's and a job's figures were at the last looks."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from hotloop.monitor.reading import Card

History = Mapping[str, tuple[float, ...]]
"""By line: values at the last looks that had one, the newest last."""

_KEPT = 60
_HOT_CELSIUS = 100.0


@dataclass(frozen=True)
class Line:
    """A figure that is drawn over time.

    Attributes:
        of_card: whether it is a card's; else a job's.
        least, most: between which it is drawn; None: its own.
    """

    name: str
    of_card: bool = False
    least: float | None = 0.0
    most: float | None = None


LINES = (
    Line("step time"),
    Line("wait", most=1.0),
    Line("loss", least=None),
    *(Line(name, of_card=True, most=1.0) for name in ("busy", "tensor", "memory", "power", "temp")),
)


def longer(before: History, values: Mapping[str, float | None]) -> History:
    """With one more look; a value that is absent or no number leaves its line as it is."""
    known = {name: value for name, value in values.items() if value is not None and math.isfinite(value)}
    added = {name: (*before.get(name, ()), value)[-_KEPT:] for name, value in known.items()}
    return {**before, **added}


def busy(card: Card) -> float | None:
    """Share of its time, by its multiprocessors where it tells them apart."""
    return card.sm_active if card.sm_active is not None else card.utilization


def of_card(card: Card) -> dict[str, float | None]:
    """Its values now, by line, as shares of what there can be."""
    celsius = card.temperatures_celsius.get("gpu")
    return {
        "busy": busy(card),
        "tensor": card.tensor_active,
        "memory": _share(card.memory_used_bytes, card.memory_total_bytes),
        "power": _share(card.power_watts, card.power_limit_watts),
        "temp": _share(celsius, _HOT_CELSIUS),
    }


def _share(value: float | None, most: float | None) -> float | None:
    return value / most if value is not None and most else None
