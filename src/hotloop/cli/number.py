"""Numbers as options take them."""

import math

import click


class Number(click.FloatRange):
    """In a range, and finite: click's own takes "nan" in any, and "inf" in one without an end."""

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)  # type: ignore[arg-type,unused-ignore]
        if not math.isfinite(number):
            self.fail(f"{value!r} is no number", param, ctx)
        return number
