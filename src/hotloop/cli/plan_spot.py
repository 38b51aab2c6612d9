"""`hotloop plan spot`."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hotloop.cli.amount import Amount
from hotloop.cli.duration import Duration
from hotloop.cli.number import Number
from hotloop.core.errors import InputError
from hotloop.core.run import plain
from hotloop.core.units import format_seconds

if TYPE_CHECKING:
    from hotloop.plan.advice import Advice, Asked


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--lifetime", type=Duration(), help="Of a machine, on average: 6h.")
@click.option("--shape", type=Number(0.1, 20), default=1.0, show_default=True, metavar="SHAPE",
              help="Weibull's: below 1 the risk falls with age.")  # fmt: skip
@click.option("--trace", type=click.Path(path_type=Path), metavar="FILE",
              help="Machines that there were instead: a CSV file with start and end.")  # fmt: skip
@click.option("--save", type=Duration(), required=True, help="For which training waits for a checkpoint: 2s.")
@click.option("--restart", type=Duration(), default="3m", show_default=True,
              help="From a new machine's begin until it trains on.")  # fmt: skip
@click.option("--wait", type=Duration(), default="1m", show_default=True, help="Until there is a new machine, unpaid.")
@click.option("--noticed", type=Number(0, 1), default=0.0, show_default=True, metavar="SHARE",
              help="Of the interruptions, told early enough to save once more.")  # fmt: skip
@click.option("--machines", type=click.IntRange(1), default=1, show_default=True, help="That train together.")
@click.option("--together", type=Number(0, 1), default=0.0, show_default=True, metavar="SHARE",
              help="Of the losses, which take all machines at once, as of one zone.")  # fmt: skip
@click.option("--every", type=Duration(), help="Between saves.  [default: the best]")
@click.option("--price", type=Amount(), help="Of a machine's hour, spot.")
@click.option("--on-demand", type=Amount(), help="Of a machine's hour otherwise.")
@click.option("--work", type=Duration(), help="That the training takes undisturbed: 40h.")
@click.option(
    "--page", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write a page with plots."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def spot(
    lifetime: float | None, shape: float, trace: Path | None, save: float, restart: float, wait: float, noticed: float,
    machines: int, together: float, every: float | None, price: float | None, on_demand: float | None,
    work: float | None, page: Path | None, as_json: bool,
) -> int:  # fmt: skip
    """Say whether machines that may be taken away pay.

    And how far apart to save on them.

    hotloop plan spot --lifetime 6h --save 2s --price 1.9 --on-demand 4.1 --work 40h
    """
    if (lifetime is None) == (trace is None):
        raise InputError("one of --lifetime and --trace is needed", "both say how long machines live", "--lifetime 6h")
    if (price is None) != (on_demand is None):
        raise InputError("--price and --on-demand go together", "one is held against the other", "give both or none")
    try:
        from hotloop.plan.advice import Asked, advise
        from hotloop.plan.replay import read_trace
        from hotloop.plan.spot import Costs
    except ImportError as error:
        cause = f"{error.name} is not installed"
        raise InputError("planning needs hotloop[plan]", cause, 'pip install "hotloop[plan]"') from None
    asked = Asked(
        costs=Costs(save, restart, wait, noticed), mean=lifetime or 0.0, shape=shape,
        lives=tuple(read_trace(trace)) if trace else (), machines=machines, together=together, interval=every or 0.0,
        spot=price or 0.0, on_demand=on_demand or 0.0, work=work or 0.0,
    )  # fmt: skip
    advice = advise(asked)
    if page:
        _write_page(page, asked, advice)
    click.echo(json.dumps(content(advice)) if as_json else "\n".join(_lines(asked, advice)))
    return 0


def content(advice: "Advice") -> dict[str, Any]:
    """As one JSON object, the same for a job."""
    outlook, played = advice.outlook, {"low": advice.low, "middle": advice.middle, "high": advice.high}
    return plain({  # type: ignore[no-any-return]
        "interval_seconds": outlook.interval, "young_seconds": advice.young, "daly_seconds": advice.daly,
        "lifetime": advice.lifetime, "lifetime_seconds": advice.mean, "first_loss_seconds": advice.first,
        "waste": 1 - outlook.paid_share, "waste_low": advice.waste_low, "waste_high": advice.waste_high,
        "work_share": outlook.share, "paid_work_share": outlook.paid_share, "lost_share": outlook.lost_share,
        "save_share": outlook.save_share, "restart_share": outlook.restart_share,
        "price": asdict(advice.price) if advice.price else None,
        "wall_seconds": advice.wall, "paid_seconds": advice.paid, "cost": advice.cost,
        "played": {
            name: {"wall_seconds": one.wall, "paid_seconds": one.paid, "interruptions": one.interruptions}
            for name, one in played.items() if one
        },
        "curve": advice.curve,
    })  # fmt: skip


def _lines(asked: "Asked", advice: "Advice") -> list[str]:
    found = advice.outlook
    group = (
        f"; of {asked.machines}, the first is lost after {format_seconds(advice.first)}" if asked.machines > 1 else ""
    )
    young, daly = format_seconds(advice.young), format_seconds(advice.daly)
    others = f"Young's formula: {young}, Daly's: {daly}"
    if found.interval == advice.young and not asked.interval:
        unproven = "no other wastes less in parts of the trace that it is not planned from"
        others = f"Young's formula, as {unproven}; Daly's: {daly}"
    lines = [
        f"a machine lives {format_seconds(advice.mean)} ({advice.lifetime}){group}",
        f"save every {format_seconds(found.interval)} ({others})",
        f"of the time that is paid for {found.paid_share:.1%} is work, {found.lost_share:.1%} is done again, "
        f"{found.save_share:.1%} goes into saves, {found.restart_share:.1%} into restarts",
    ]
    if advice.waste_low is not None:
        lines.append(
            f"{advice.waste_low:.1%} to {advice.waste_high:.1%} is no work in nine of ten times as long as the trace, "
            "if they differ as its parts do"
        )
    if advice.price and math.isinf(advice.price.useful_hour):
        return [*lines, "nothing is ever done: machines are gone before they have trained and saved once"]
    if advice.price:
        lines.append(_price_line(asked, advice))
    if advice.wall is not None and advice.paid is not None:
        cost = f", for {advice.cost:,.2f}" if advice.cost is not None else ""
        wall, paid = format_seconds(advice.wall), format_seconds(advice.paid)
        lines.append(f"{format_seconds(asked.work)} of work take about {wall}, {paid} of them paid{cost}")
    if advice.low and advice.high:
        low, high = format_seconds(advice.low.wall), format_seconds(advice.high.wall)
        lines.append(f"played through the trace from 200 moments: {low} to {high} (nine in ten)")
    return lines


def _price_line(asked: "Asked", advice: "Advice") -> str:
    cost = advice.price
    assert cost
    if cost.saving <= 0:
        return (
            f"spot does not pay: an hour of work costs {cost.useful_hour:,.2f} there and {cost.on_demand_hour:,.2f} on "
            f"demand; it would below {cost.ceiling / asked.machines:,.2f} for a machine's hour"
        )
    return (
        f"an hour of work costs {cost.useful_hour:,.2f} instead of {cost.on_demand_hour:,.2f}: {cost.saving:.0%} is "
        f"saved; spot pays up to {cost.ceiling / asked.machines:,.2f} for a machine's hour"
    )


def _write_page(file: Path, asked: "Asked", advice: "Advice") -> None:
    from hotloop.core.errors import cannot_write
    from hotloop.core.files import write_atomic
    from hotloop.pages.spot import render_spot

    content: dict[str, Any] = {"lines": _lines(asked, advice), "curve": advice.curve, "outlook": asdict(advice.outlook)}
    try:
        write_atomic(file, render_spot(**content))
    except OSError as error:
        raise cannot_write(file.parent, error, InputError, "--page FILE") from None
    click.echo(f"page: {file}", err=True)
