"""The page of a job's plan."""

from collections.abc import Mapping, Sequence

from hotloop.core.units import format_bytes
from hotloop.pages.charts import Chart, Series
from hotloop.pages.environment import environment

_COLOURS = (
    "#2563eb",
    "#ea580c",
    "#059669",
    "#9333ea",
    "#0891b2",
    "#ca8a04",
    "#dc2626",
    "#4f46e5",
    "#65a30d",
    "#64748b",
)


def render_plan(
    name: str, lines: Sequence[str], parts: Mapping[str, float], ways: Sequence[Sequence[str]],
    rows: Sequence[Sequence[str]], costs: Sequence[tuple[float, float, str]], spot: Sequence[str],
    curve: Sequence[tuple[float, float]], notes: Sequence[str],
) -> str:  # fmt: skip
    """The page, as HTML without any outside reference.

    Args:
        lines: what is found, in words.
        parts: of a GPU's memory, in bytes.
        ways, rows: of the tables of other ways and of options, as the terminal shows them.
        costs: hours, price and name of the options that fit.
        spot: what is found of spot machines, in words; curve: seconds between saves, and the share that is work.
        notes: on the prices, in words.
    """
    total = sum(parts.values())
    shares = [(part, format_bytes(size), colour, size / total)
              for (part, size), colour in zip(sorted(parts.items(), key=lambda one: -one[1]), _COLOURS, strict=False)
              if size]  # fmt: skip
    prices = Chart(
        "price of the whole training on demand, by its hours", "hours",
        [_instances("all", costs, joined=False), _instances("none is both faster and cheaper", _best(costs))],
        marks=True, log=True, log_x=True,
    ) if costs else None  # fmt: skip
    saves = Chart(
        "share of the paid time that is work, by the minutes between saves", "minutes between saves",
        [Series("on spot machines", [seconds / 60 for seconds, _ in curve], [share for _, share in curve])],
        percent=True, log_x=True,
    ) if curve else None  # fmt: skip
    return (
        environment()
        .get_template("plan.html")
        .render(name=name, lines=lines, shares=shares, ways=ways, rows=rows, prices=prices, spot=spot, saves=saves,
                notes=notes)
    )  # fmt: skip


def _instances(label: str, costs: Sequence[tuple[float, float, str]], joined: bool = True) -> Series:
    return Series(label, [hours for hours, _, _ in costs], [price for _, price, _ in costs], joined)


def _best(costs: Sequence[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
    """Those than which none is both faster and cheaper, fastest first."""
    found: list[tuple[float, float, str]] = []
    for one in sorted(costs):
        if not found or one[1] < found[-1][1]:
            found.append(one)
    return found
