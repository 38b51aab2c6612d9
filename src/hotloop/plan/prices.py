"""What instances with GPUs cost: data, with a date and a source for each price. What is not known is left out."""

import csv
import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from datetime import date as Date  # noqa: N812 - a field has its name
from importlib import resources
from pathlib import Path
from typing import Any

from hotloop.core.errors import InputError
from hotloop.core.files import user_cache
from hotloop.plan.cards import cards

OLD_DAYS = 90
"""From which on a price is said to be old."""
_MOST_BYTES = 64 << 20
_COLUMNS = "columns: provider,instance,region,zone,card,gpus,cpus,memory_gib,on_demand,spot,date,source"


@dataclass(frozen=True)
class Offer:
    """An instance in a place.

    Attributes:
        card: key of a card.
        on_demand, spot: of its hour; None where it is not known.
        date: of the price; None where it is not known.
    """

    provider: str
    instance: str
    region: str
    zone: str
    card: str
    gpus: int
    cpus: float
    memory_gib: float
    on_demand: float | None
    spot: float | None
    date: Date | None
    source: str

    def age(self, today: Date) -> int | None:
        """Days; None where it is not known."""
        return (today - self.date).days if self.date else None


def packaged_offers() -> list[Offer]:
    """Those that `hotloop plan catalog --refresh` has written, or else those that come with hotloop.

    Raises:
        InputError: what is kept cannot be read, as another version's may not.
    """
    kept = kept_file()
    if kept and kept.is_file():
        try:
            return read_offers(kept)
        except InputError as error:
            fix = f"rm {kept}, then hotloop plan catalog --refresh FILE"
            raise InputError(error.what, error.cause, fix) from None
    return parse_offers(resources.files("hotloop.plan").joinpath("prices.csv").read_text(), "prices.csv")


def kept_file() -> Path | None:
    """Where refreshed prices are kept; None for a user without a home."""
    cache = user_cache()
    return cache / "prices.csv" if cache else None


def read_offers(file: Path) -> list[Offer]:
    """Prices of one's own.

    Raises:
        InputError: the file cannot be read, or is no such table.
    """
    try:
        with file.open("rb") as opened:
            content = opened.read(_MOST_BYTES + 1)
        text = content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} cannot be read", str(error), "--prices FILE, a CSV file") from None
    if len(content) > _MOST_BYTES:
        raise InputError(
            f"{file} has more than {_MOST_BYTES >> 20} MiB", "a table of prices is smaller", "see the file"
        )
    return parse_offers(text, str(file))


def written(offers: Iterable[Offer]) -> str:
    """The table, as CSV."""
    file = io.StringIO()
    table = csv.DictWriter(file, [field.name for field in fields(Offer)], lineterminator="\n")
    table.writeheader()
    for offer in offers:
        table.writerow({name: "" if value in (None, 0.0) else value for name, value in asdict(offer).items()})
    return file.getvalue()


def parse_offers(text: str, origin: str) -> list[Offer]:
    """Of a table as `written` makes it.

    Raises:
        InputError: it is no such table.
    """
    rows = csv.DictReader(io.StringIO(text))
    missing = {"instance", "card", "gpus"} - set(rows.fieldnames or ())
    if missing:
        raise InputError(f"{origin} is no table of prices", f"it has no column {', '.join(sorted(missing))}", _COLUMNS)
    if twice := [name for name, times in Counter(rows.fieldnames or ()).items() if times > 1]:
        raise InputError(f"{origin} is no table of prices", f"it has several columns {', '.join(twice)}", _COLUMNS)
    try:
        found = [_offer(row) for row in rows]
    except ValueError as error:
        raise InputError(f"{origin}, line {rows.line_num}", str(error), _COLUMNS) from None
    except csv.Error as error:
        raise InputError(f"{origin} is no table of prices", str(error), _COLUMNS) from None
    return found


def _offer(read: Mapping[str | None, Any]) -> Offer:
    if beyond := [value for value in read.get(None, ()) if value.strip()]:  # 12,50 is two values
        raise ValueError(f"more values than columns: {', '.join(beyond)}")
    row = {name: (value or "").strip() for name, value in read.items() if name}
    card = row["card"]
    if card not in cards():
        raise ValueError(f"unknown card {card!r}; there are {', '.join(cards())}")
    if not row["instance"]:
        raise ValueError("an instance without a name")
    gpus = int(row["gpus"])
    if gpus < 1:
        raise ValueError(f"{gpus} GPUs")
    return Offer(
        provider=row.get("provider", ""),
        instance=row["instance"],
        region=row.get("region", ""),
        zone=row.get("zone", ""),
        card=card,
        gpus=gpus,
        cpus=_amount(row.get("cpus", "")),
        memory_gib=_amount(row.get("memory_gib", "")),
        on_demand=_number(row.get("on_demand", "")),
        spot=_number(row.get("spot", "")),
        date=of_the_past(Date.fromisoformat(row["date"])) if row.get("date") else None,
        source=row.get("source", ""),
    )


def of_the_past(date: Date) -> Date:
    """A price's date.

    Raises:
        ValueError: it is to come.
    """
    if (date - datetime.now(UTC).date()).days > 1:  # in the east it is tomorrow already
        raise ValueError(f"{date} is in the future")
    return date


def _number(text: str) -> float | None:
    if not text:
        return None
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError(f"{text} is no price")
    return value


def _amount(text: str) -> float:
    """0 where it is not known."""
    value = float(text or 0.0)
    if not 0 <= value < float("inf"):
        raise ValueError(f"{text} is no amount")
    return value


def cheapest_of_kinds(offers: Sequence[Offer]) -> list[Offer]:
    """Of each kind of instance the place with the lowest price on demand, with the lowest spot price of that region."""
    best: dict[tuple[str, str, str, int], Offer] = {}
    for offer in offers:
        kind = (offer.provider, offer.instance, offer.card, offer.gpus)
        if kind not in best or _price(offer) < _price(best[kind]):
            best[kind] = offer
    return list(best.values())


def _price(offer: Offer) -> tuple[float, float]:
    return offer.on_demand or float("inf"), offer.spot or float("inf")
