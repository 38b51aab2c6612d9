"""`hotloop plan JOB`."""

import gc
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hotloop.cli.amount import Amount
from hotloop.cli.duration import Duration
from hotloop.cli.plan_spot import content as spot_content
from hotloop.cli.table import print_table
from hotloop.core.errors import InputError, cannot_write
from hotloop.core.units import count, format_bytes, format_seconds

if TYPE_CHECKING:
    from hotloop.core.job import Job
    from hotloop.plan.advice import Advice
    from hotloop.plan.options import Option, Setup
    from hotloop.plan.planning import Plan
    from hotloop.plan.prices import Offer

_WAYS = ("GPUs", "parallel", "precision", "activations", "batch", "memory of a GPU", "fits", "a step")
_ROWS = 12
_MANY = 1_000_000


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("file", metavar="JOB", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Lay a value over the file's.")
@click.option("--card", metavar="NAME", help="To plan for: H100.  [default: this machine's, or else H100]")
@click.option("--gpus", type=click.IntRange(1), default=1, show_default=True, help="Of that card.")
@click.option("--samples", type=click.IntRange(1), help="Of an epoch, where the data here is but a part of it.")
@click.option("--ways", "every_way", is_flag=True, help="Try recomputation, precisions and divisions too.")
@click.option("--measure", is_flag=True, help="Time some steps on this machine's GPUs; other cards are scaled by them.")
@click.option("--fastest", is_flag=True, help="Sort by time.")
@click.option("--cheapest", is_flag=True, help="Sort by cost: the default.")
@click.option("--deadline", type=Duration(), help="Leave out what takes longer: 12h.")
@click.option("--budget", type=Amount(), help="Leave out what costs more on demand.")
@click.option("--provider", "providers", multiple=True, metavar="NAME", help="Only of these: aws, gcp, azure, ...")
@click.option("--region", "regions", multiple=True, metavar="NAME", help="Only in these: us-east-1.")
@click.option("--zone", "zones", multiple=True, metavar="NAME", help="Only in these: use1-az1.")
@click.option("--prices", type=click.Path(path_type=Path), metavar="FILE", help="Prices of one's own, a CSV file.")
@click.option("--lifetime", type=Duration(), help="Of a spot machine, on average.  [default: checkpoint.interruption]")
@click.option("--save", type=Duration(), help="For which training waits for a checkpoint.  [default: by its size]")
@click.option("--page", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Write a page with plots.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def job(
    file: Path, overrides: tuple[str, ...], card: str | None, gpus: int, samples: int | None, every_way: bool,
    measure: bool, fastest: bool, cheapest: bool, deadline: float | None, budget: float | None,
    providers: tuple[str, ...], regions: tuple[str, ...], zones: tuple[str, ...], prices: Path | None,
    lifetime: float | None, save: float | None, page: Path | None, as_json: bool,
) -> int:  # fmt: skip
    """Say what a job needs, how long it takes, where, for how much.

    The model is traced without a GPU and without its weights.
    """
    from hotloop.core.job_file import load_job

    if fastest and cheapest:
        raise InputError("--fastest and --cheapest contradict each other", "one sorts by time, one by cost", "give one")
    asked = load_job(file, overrides)
    offers = _offers(prices, {"provider": providers, "region": regions, "zone": zones})
    sys.path.append(os.getcwd())  # "module:name" in a job means the user's own files
    try:
        from hotloop.plan.cards import card_named
        from hotloop.plan.options import by_cost, by_time
        from hotloop.plan.planning import Request, plan_job
        from hotloop.plan.prices import cheapest_of_kinds
    except ImportError as error:
        cause = f"{error.name} is not installed"
        raise InputError("planning a job needs hotloop[train]", cause, 'pip install "hotloop[train]"') from None
    if page and (not page.absolute().parent.is_dir() or (page.exists() and not page.is_file())):
        raise InputError(
            f"--page {page} cannot be written", "it is no file in a folder that there is", "--page plan.html"
        )
    chosen = card_named(_own_card() if card is None else card)
    request = Request(chosen, gpus, samples or 0, tuple(cheapest_of_kinds(offers)), every_way)
    gc.disable()  # graphs are full of circles: looking for what is garbage among them took a tenth of the time
    try:
        with redirect_stdout(sys.stderr):  # what the model prints is no part of the answer
            plan = plan_job(asked, request, partial(click.echo, err=True), _measured if measure else None)
    finally:
        gc.enable()
    sort: Callable[[Sequence[Option]], list[Option]] = by_time if fastest else by_cost
    options = [one for one in sort(plan.options) if _within(one, deadline, budget)]
    both = _with_both_prices(options)
    advice = _spot(asked, plan, both, lifetime, save) if both else None
    spot = _spot_lines(both, advice) if both and advice else []
    curve = advice.curve if advice else ()
    if page:
        _write_page(page, asked, plan, options, spot, curve, _price_notes(offers))
    if as_json:
        click.echo(json.dumps(_content(plan, options, advice, offers)))
        return 0
    for line in _lines(asked, plan):
        click.echo(line)
    if plan.ways:
        print_table(_WAYS, [_way(way) for way in plan.ways])
    _print_options(options, len(plan.options), bool(deadline or budget))
    for line in [*spot, *_price_notes(offers)]:
        click.echo(line)
    return 0


def _offers(prices: Path | None, asked: Mapping[str, Sequence[str]]) -> "list[Offer]":
    """Those of the providers, regions and zones that are asked for, where any are."""
    from hotloop.plan.prices import packaged_offers, read_offers

    known = read_offers(prices) if prices else packaged_offers()
    for kind, names in asked.items():
        having = {getattr(one, kind) for one in known}
        for name in names:
            if name not in having:
                there = ", ".join(sorted(filter(None, having))) or "none in this table"
                raise InputError(
                    f'--{kind} "{name}" has no prices', f"there are {there}", f"--{kind} NAME, or --prices FILE"
                )
    chosen = [one for one in known if all(not names or getattr(one, kind) in names for kind, names in asked.items())]
    if not chosen and known:
        words = ", ".join(name for names in asked.values() for name in names)
        raise InputError(
            f"nothing has prices that is all of {words}", "a provider's regions and zones have names of their own",
            "hotloop plan catalog --provider NAME",
        )  # fmt: skip
    return chosen


def _own_card() -> str:
    """Of this machine, if a plan knows it."""
    from hotloop.core.machine import read_machine
    from hotloop.plan.cards import cards

    known = {card.name for card in cards().values()}
    return next((gpu.name for gpu in read_machine().gpus if gpu.name in known), "H100")


def _measured(job: "Job") -> float:
    """Seconds of a step of this job on this machine's GPUs."""
    from hotloop.core.machine import read_machine
    from hotloop.tune.job_trials import step_seconds
    from hotloop.tune.running import Failed

    if not read_machine().gpus:
        raise InputError("--measure, and there is no GPU here", "a step is timed where it will run", "leave it out")
    click.echo("timing some steps ...", err=True)
    try:
        return step_seconds(job.model_copy(update={"device": "cuda"}), os.environ)
    except Failed as error:
        raise InputError("the job could not be timed", str(error), "hotloop train with the same job") from None


def _within(option: "Option", deadline: float | None, budget: float | None) -> bool:
    if deadline and option.seconds > deadline:
        return False
    return not budget or (option.cost is not None and option.cost <= budget)


def _spot(job: "Job", plan: "Plan", option: "Option", lifetime: float | None, save: float | None) -> "Advice":
    """Of an option that has both prices."""
    from hotloop.plan.advice import Asked, advise
    from hotloop.plan.planning import save_seconds
    from hotloop.plan.spot import Costs

    assert option.offer
    costs = Costs(save or save_seconds(plan.needs, option.setup), restart=180.0, wait=60.0)
    mean, offer = lifetime or job.checkpoint.interruption.amount, option.offer
    return advise(Asked(costs, mean, spot=offer.spot or 0.0, on_demand=offer.on_demand or 0.0, work=option.seconds))


def _with_both_prices(options: "Sequence[Option]") -> "Option | None":
    """The first one."""
    return next((one for one in options if one.setup.fits and (at := one.offer) and at.spot and at.on_demand), None)


def _lines(job: "Job", plan: "Plan") -> list[str]:
    setup, asked = plan.asked.setup, plan.asked
    memory, step = setup.memory, setup.time
    how = f"{setup.precision}{', compiled' if plan.compiled else ''}"
    how += f", {setup.parallel}" if setup.gpus > 1 else ""
    how += f", activations of {setup.activations} recomputed" if setup.activations != "keep" else ""
    most = f"{plan.largest_batch:,}" if plan.largest_batch < _MANY else "a million and more"
    fits = f"batches of up to {most} a GPU fit" if setup.fits else "it does not fit"
    largest = sorted(memory.parts.items(), key=lambda part: -part[1])
    parts = [f"{name} {format_bytes(size)}" for name, size in largest if size >= 0.01 * memory.peak]
    rate = job.data.batch_size * job.train.accumulate / step.seconds
    lines = [
        f"{job.model.name}: {plan.parameters:,} weights, {count(plan.samples, 'sample')} an epoch, "
        f"{count(plan.steps, 'step')} of {job.data.batch_size * job.train.accumulate} in {count(plan.epochs, 'epoch')}",
        f"on {setup.gpus} × {setup.card.key} ({how}):",
        f"  memory   {format_bytes(memory.peak)} of {format_bytes(setup.card.memory_bytes)}; {fits}",
        f"           {', '.join(parts)}",
        f"  time     {format_seconds(step.seconds)} a step ({format_seconds(step.low)} to {format_seconds(step.high)}, "
        f"{step.source}), {rate:,.0f} samples/s; an epoch {format_seconds(asked.epoch_seconds)}, all "
        f"{format_seconds(asked.seconds)}, start and compiling not counted",
    ]
    needs = plan.needs
    parts = [f"{count(needs.cpus, 'processor')} to decode images"] if needs.cpus else []
    parts += [f"{format_bytes(needs.read_bytes_per_second)}/s of files"] if needs.read_bytes_per_second else []
    parts += [f"{format_bytes(needs.host_bytes)} of memory", f"checkpoints of {format_bytes(needs.checkpoint_bytes)}"]
    lines.append(f"  host     {', '.join(parts)}")
    return [*lines, f"note: {_untraced(plan)}"] if plan.untraced else lines


def _untraced(plan: "Plan") -> str:
    return f"all of this is of a step of few samples that was made here: the model cannot be traced ({plan.untraced})"


def _way(way: "Setup") -> tuple[str, ...]:
    return (
        str(way.gpus), way.parallel, way.precision, way.activations, str(way.batch), format_bytes(way.memory.peak),
        "yes" if way.fits else "no", format_seconds(way.time.seconds),
    )  # fmt: skip


def _print_options(options: "Sequence[Option]", known: int, limited: bool) -> None:
    if not options:
        click.echo("no instance is within those limits" if known and limited else "no prices are known")
        return
    rows = [_row(option) for option in options[:_ROWS]]
    print_table(("instance", "region", "GPUs", "parallel", "memory of a GPU", "time", "$ on demand", "$ spot"), rows)
    if len(options) > _ROWS:
        click.echo(f"and {len(options) - _ROWS} more: --json has them all")


def _row(option: "Option") -> tuple[str, ...]:
    setup, offer = option.setup, option.offer
    assert offer
    memory = format_bytes(setup.memory.peak) if setup.fits else f"{format_bytes(setup.memory.peak)}: too much"
    how = setup.parallel if setup.activations == "keep" else f"{setup.parallel}, {setup.activations}"
    return (
        f"{offer.provider} {offer.instance}".strip(), offer.region, f"{setup.gpus} × {setup.card.key}", how, memory,
        format_seconds(option.seconds) if setup.fits else "", _money(option.cost, setup.fits),
        _money(option.spot_cost, setup.fits),
    )  # fmt: skip


def _money(value: float | None, fits: bool) -> str:
    if value is None or not fits:
        return ""
    return f"{value:,.2f}" if value >= 0.1 else f"{value:.2g}"


def _spot_lines(option: "Option", advice: "Advice") -> list[str]:
    assert advice.price
    cost, found, where = advice.price, advice.outlook, _row(option)[0]
    if cost.saving <= 0:
        return [f"spot does not pay on {where}, the first that has both prices"]
    return [
        f"spot, if a machine lives {format_seconds(advice.mean)} on average: save every "
        f"{format_seconds(found.interval)}; {1 - found.paid_share:.1%} of the paid time is lost, "
        f"{cost.saving:.0%} of the price is saved ({where})"
    ]


def _price_notes(offers: "Sequence[Offer]") -> list[str]:
    """How old what is known is."""
    from hotloop.plan.prices import OLD_DAYS

    today = datetime.now(UTC).date()
    ages = [one.age(today) for one in offers]
    known = [age for age in ages if age is not None]
    notes = []
    if known and max(known) > OLD_DAYS:
        old = sum(age > OLD_DAYS for age in known)
        are = "is" if old == 1 else "are"
        notes.append(f"note: {count(old, 'price')} {are} older than {OLD_DAYS} days, the oldest {max(known)} days")
    if len(known) < len(ages):
        notes.append(f"note: of {count(len(ages) - len(known), 'price')} the date is not known")
    return [*notes, "  newer ones: hotloop plan catalog --refresh FILE"] if notes else []


def _content(
    plan: "Plan", options: "Sequence[Option]", advice: "Advice | None", offers: "Sequence[Offer]"
) -> dict[str, Any]:
    setup, step = plan.asked.setup, plan.asked.setup.time
    return {
        "model": {"parameters": plan.parameters, "flops_per_step": plan.flops_per_step, "compiled": plan.compiled},
        "memory": {**_memory(setup), "largest_batch": plan.largest_batch},
        "time": {
            "step_seconds": step.seconds, "low": step.low, "high": step.high, "source": step.source,
            "epoch_seconds": plan.asked.epoch_seconds, "seconds": plan.asked.seconds, "steps": plan.steps,
        },
        "ways": [_setup(way) for way in plan.ways],
        "options": [_option(one) for one in options],
        "spot": spot_content(advice) if advice else None,
        "needs": asdict(plan.needs),
        "notes": [
            *([_untraced(plan)] if plan.untraced else []),
            *(note.removeprefix("note: ") for note in _price_notes(offers) if note.startswith("note: ")),
        ],
    }  # fmt: skip


def _memory(setup: "Setup") -> dict[str, Any]:
    memory = setup.memory
    return {
        "peak_bytes": memory.peak, "allocated_bytes": memory.allocated, "parts": dict(memory.parts),
        "card_bytes": setup.card.memory_bytes, "fits": setup.fits,
    }  # fmt: skip


def _setup(setup: "Setup") -> dict[str, Any]:
    return {
        "card": setup.card.key, "gpus": setup.gpus, "parallel": setup.parallel, "precision": setup.precision,
        "activations": setup.activations, "batch": setup.batch, "memory": _memory(setup),
        "step_seconds": setup.time.seconds, "low": setup.time.low, "high": setup.time.high,
    }  # fmt: skip


def _option(option: "Option") -> dict[str, Any]:
    offer = option.offer
    where = (
        {name: str(value) if name == "date" and value else value for name, value in asdict(offer).items()}
        if offer
        else {}
    )
    return {
        **where, **_setup(option.setup), "seconds": option.seconds, "epoch_seconds": option.epoch_seconds,
        "cost": option.cost, "cost_per_epoch": option.cost_per_epoch, "spot_cost": option.spot_cost,
    }  # fmt: skip


def _write_page(
    file: Path, job: "Job", plan: "Plan", options: "Sequence[Option]", spot: Sequence[str],
    curve: Sequence[tuple[float, float]], notes: Sequence[str],
) -> None:  # fmt: skip
    from hotloop.core.files import write_atomic
    from hotloop.pages.plan import render_plan

    fitting = [option for option in options if option.setup.fits and option.cost is not None]
    rows = [_row(option) for option in options]
    costs = [(option.seconds / 3600, option.cost or 0.0, _row(option)[0]) for option in fitting]
    content = render_plan(
        job.model.name, _lines(job, plan), dict(plan.asked.setup.memory.parts), [_way(way) for way in plan.ways], rows,
        costs, spot, curve, notes,
    )  # fmt: skip
    try:
        write_atomic(file, content)
    except OSError as error:
        raise cannot_write(file.parent, error, InputError, "--page FILE") from None
    click.echo(f"page: {file}", err=True)
