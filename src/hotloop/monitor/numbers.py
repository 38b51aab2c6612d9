"""Numbers from the driver, without those that stand for none."""

import math
from typing import Any

_BLANK = (
    (0x7FFFFFF0, 0x7FFFFFFF),  # DCGM's, 32 bits
    (0xFFFFFFFF, 0xFFFFFFFF),  # NVML's
    (0x7FFFFFFFFFFFFFF0, 0x7FFFFFFFFFFFFFFF),
    (0xFFFFFFFFFFFFFFFF, 0xFFFFFFFFFFFFFFFF),
    (140737488355328.0, 140737488355343.0),  # DCGM's, of floating point
    (9223372036854775792.0, 9223372036854775808.0),  # the same of 64 bits, rounded
)


def known(value: Any) -> Any:
    """The number; None for "not available", "not found" and the like, which drivers and DCGM give as huge ones."""
    if value is None or not math.isfinite(value):
        return None
    if value < _BLANK[0][0]:  # nearly all
        return value
    return None if any(low <= value <= high for low, high in _BLANK) else value


def scaled(value: Any, factor: float) -> Any:
    """The number times a factor; None if it is none."""
    number = known(value)
    return None if number is None else number * factor
