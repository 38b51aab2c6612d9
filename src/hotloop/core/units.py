"""Amounts with their unit, as users write and read them."""

import re
from dataclasses import dataclass
from typing import Literal

Unit = Literal["steps", "epochs", "seconds"]

_UNITS: dict[str, tuple[Unit, float]] = {
    "step": ("steps", 1),
    "epoch": ("epochs", 1),
    "s": ("seconds", 1),
    "second": ("seconds", 1),
    "min": ("seconds", 60),
    "minute": ("seconds", 60),
    "h": ("seconds", 3600),
    "hour": ("seconds", 3600),
}
_INTERVAL = re.compile(r"\s*(-?\d+(?:\.\d+)?)\s*([a-z]+)\s*")


@dataclass(frozen=True)
class Interval:
    """How often something happens: an amount of steps, epochs or seconds."""

    amount: float
    unit: Unit

    @classmethod
    def parse(cls, text: str, like: str = '"7 steps", "1 epoch", "30 s", "5 min" or "2 h"') -> "Interval":
        """Read "7 steps", "1 epoch", "30 s", "5 min" or "2 h".

        Args:
            like: examples for the error, of what is taken where this is read.

        Raises:
            ValueError: the text is none of these, the amount is zero, or steps or epochs are not whole.
        """
        match = _INTERVAL.fullmatch(text.lower())
        word = match[2] if match else ""
        known = _UNITS.get(word) or _UNITS.get(word.removesuffix("s"))
        if match is None or known is None:
            raise ValueError(f"write an amount and a unit: {like}")
        unit, factor = known
        amount = float(match[1]) * factor
        if amount <= 0:
            raise ValueError("the amount must be more than 0")
        if unit != "seconds" and amount != int(amount):
            raise ValueError(f"{unit} must be a whole number")
        return cls(amount, unit)

    def __str__(self) -> str:
        number = f"{self.amount:.12g}"
        if self.unit == "seconds":
            return f"{number} s"
        return f"{number} {self.unit.removesuffix('s') if self.amount == 1 else self.unit}"


def format_bytes(size_bytes: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size_bytes) < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


def format_seconds(seconds: float) -> str:
    """3725 -> "1 h 02 min"; 72 -> "1 min 12 s"; 3.21 -> "3.2 s"; 0.0321 -> "32.1 ms"."""
    if 0 < seconds < 0.95:
        return f"{1e6 * seconds:.3g} µs" if seconds < 1e-4 else f"{1000 * seconds:.3g} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def format_amount(value: float, unit: str) -> str:
    """456e12, "FLOP/s" -> "456 TFLOP/s"; 1234.5, "samples/s" -> "1,234 samples/s"."""
    if unit != "FLOP/s":
        return f"{value:,.0f} {unit}"
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9)):
        if value >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value / 1e6:.3g} M{unit}"


def count(number: int, singular: str, plural: str = "") -> str:
    """1, "file" -> "1 file"; 1200, "file" -> "1,200 files"."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def escaped(text: str) -> str:
    """Of a name: what would break the line or move the cursor is written as in Python's strings."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
