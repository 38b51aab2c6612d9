"""Durations as options take them."""

import re

import click

_UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


class Duration(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """Seconds, written as "90s", "5m", "1h" or "2d"; more than none."""

    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|d)", str(value).strip())
        if not found or not float(found[1]):
            self.fail(f"{value!r} is no duration: 90s, 5m, 1h", param, ctx)
        return float(found[1]) * _UNITS[found[2]]
