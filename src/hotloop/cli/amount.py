"""Amounts of money as options take them."""

import math

import click


class Amount(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """More than nothing, and a number: click's own ranges take "nan" and "inf"."""

    name = "amount"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            amount = float(str(value))
        except ValueError:
            amount = math.nan
        if not 0 < amount < math.inf:
            self.fail(f"{value!r} is no amount of money: 4.10", param, ctx)
        return amount
