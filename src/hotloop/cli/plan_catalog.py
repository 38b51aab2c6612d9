"""`hotloop plan catalog`."""

import json
from collections import Counter
from dataclasses import asdict, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hotloop.core.errors import InputError, cannot_write
from hotloop.core.units import count

if TYPE_CHECKING:
    from hotloop.plan.prices import Offer

_MOST_BYTES = 64 << 20
_SECONDS = 60


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--card", metavar="NAME", help="Only with this one: H100.")
@click.option("--provider", metavar="NAME", help="Only of this one; with --refresh, whose prices these are.")
@click.option(
    "--refresh", metavar="FILE|URL", help="Take prices from a table: ours, or a vms.csv of SkyPilot's catalog."
)
@click.option("--date", "on", type=click.DateTime(["%Y-%m-%d"]), help="Of the prices that --refresh takes.")
@click.option("--dry-run", is_flag=True, help="Say what --refresh would take, and keep nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def catalog(
    card: str | None, provider: str | None, refresh: str | None, on: datetime | None, dry_run: bool, as_json: bool
) -> int:
    """Show the prices that are known, or take new ones.

    A refresh replaces the prices of the providers in the table, and is kept in the user's cache. A URL is fetched by
    https, and only when it is given here.
    """
    from hotloop.cli.table import print_table
    from hotloop.plan.cards import card_named
    from hotloop.plan.prices import packaged_offers

    if not refresh and (on or dry_run):
        option = "--date" if on else "--dry-run"
        what = f"{option} goes with --refresh"
        raise InputError(what, "it is of prices that are taken from a table", f"--refresh FILE, or leave {option} out")
    known = packaged_offers()
    taken = _taken(refresh, provider, _day(on)) if refresh else []
    replaced = {one.provider for one in taken}
    offers = [*(one for one in known if one.provider not in replaced), *taken]
    shown = _chosen(offers, provider, card_named(card).key if card else None)
    if refresh:
        click.echo(f"{_counted(taken)}{', not kept' if dry_run else ''}", err=True)
        if not dry_run:
            _keep(offers)
    if as_json:
        rows = [{**asdict(one), "date": str(one.date) if one.date else None} for one in shown]
        click.echo(json.dumps({"offers": rows}))
        return 0
    today = datetime.now(UTC).date()
    print_table(
        ("provider", "instance", "region", "zone", "GPUs", "on demand", "spot", "date", "source"),
        [
            (
                one.provider, one.instance, one.region, one.zone, f"{one.gpus} × {one.card}", _price(one.on_demand),
                _price(one.spot), f"{one.date} ({one.age(today)} days)" if one.date else "not known", one.source,
            )
            for one in shown
        ],
    )  # fmt: skip
    return 0


def _day(on: datetime | None) -> date | None:
    from hotloop.plan.prices import of_the_past

    try:
        return of_the_past(on.date()) if on else None
    except ValueError as error:
        fix = f"--date {datetime.now(UTC).date()}, or leave it out"
        raise InputError(f"--date {error}", "a price is known from its day on", fix) from None


def _chosen(offers: "list[Offer]", provider: str | None, card: str | None) -> "list[Offer]":
    providers = {one.provider for one in offers}
    if provider and provider not in providers:
        there = ", ".join(sorted(filter(None, providers)))
        what = f'--provider "{provider}" has no prices'
        raise InputError(what, f"there are {there}", "--provider NAME, or take its prices: --refresh FILE")
    return [one for one in offers if provider in (None, one.provider) and card in (None, one.card)]


def _taken(place: str, provider: str | None, on: date | None) -> "list[Offer]":
    from hotloop.plan.prices import parse_offers
    from hotloop.plan.skypilot import read_table

    text = _fetched(place) if "://" in place else _read(Path(place))
    if "AcceleratorName" not in text.partition("\n")[0]:
        offers = parse_offers(text, place)
        taken = [replace(one, provider=one.provider or provider or "", date=one.date or on) for one in offers]
    elif provider:
        taken = read_table(text, provider, on, f"SkyPilot catalog, {place}")
    else:
        what = f"{place} does not say whose prices these are"
        raise InputError(what, "SkyPilot's tables are one a cloud", "--provider aws")
    if not taken:
        raise InputError(f"{place} has no prices", "it holds no instance with a card that is known", "see the file")
    return taken


def _read(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            content = opened.read(_MOST_BYTES + 1)
    except OSError as error:
        raise InputError(f"{file} cannot be read", error.strerror or str(error), "--refresh FILE") from None
    return _decoded(content, str(file))


def _fetched(url: str) -> str:
    from urllib.request import Request, urlopen

    if not url.startswith("https://"):
        raise InputError(
            f"{url} is not fetched", "prices are fetched by https alone", "--refresh https://... or a file"
        )
    try:
        with urlopen(Request(url), timeout=_SECONDS) as answer:  # noqa: S310 - https, as just seen
            return _decoded(answer.read(_MOST_BYTES + 1), url)
    except OSError as error:
        raise InputError(f"{url} cannot be fetched", str(error), "fetch it otherwise, and --refresh FILE") from None


def _decoded(content: bytes, place: str) -> str:
    if len(content) > _MOST_BYTES:
        what = f"{place} has more than {_MOST_BYTES >> 20} MiB"
        raise InputError(what, "a table of prices is smaller", "see the file")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{place} is no text", str(error), "--refresh a CSV file") from None


def _keep(offers: "list[Offer]") -> None:
    from hotloop.core.files import write_atomic
    from hotloop.plan.prices import kept_file, written

    file = kept_file()
    if file is None:
        raise InputError("the prices cannot be kept", "this user has no home", "XDG_CACHE_HOME=FOLDER")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, written(offers))
    except OSError as error:
        raise cannot_write(file.parent, error, InputError, "XDG_CACHE_HOME=FOLDER") from None
    click.echo(f"kept in {file}", err=True)


def _counted(offers: "list[Offer]") -> str:
    kinds = Counter(one.provider or "no provider" for one in offers)
    return ", ".join(f"{count(number, 'price')} of {name}" for name, number in kinds.items())


def _price(value: float | None) -> str:
    return f"{value:,.2f}" if value is not None else ""
