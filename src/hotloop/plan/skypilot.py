"""Prices from the tables of SkyPilot's catalog, one a cloud, read by the names of their columns.

They differ: on Google's, machines and GPUs have rows of their own; none says its date or its cloud.
Source: https://github.com/skypilot-org/skypilot-catalog
"""

import csv
import io
import re
from collections.abc import Iterator, Mapping
from datetime import date as Date  # noqa: N812 - a field has its name

from hotloop.core.errors import InputError
from hotloop.plan.cards import cards
from hotloop.plan.prices import Offer

_NEEDED = {"InstanceType", "AcceleratorName", "AcceleratorCount", "Price", "SpotPrice", "Region"}
_CARDS = {"V100": "V100-16GB", "A100": "A100-40GB", "H100-MEGA": "H100"}
_VARIANTS = (("Standard_NC.*_H100_v5", "H100-NVL"), ("(?i).*pcie", "H100-PCIe"))
"""Machines whose H100 is another card than the table says."""
_MISCOUNTED = {"Standard_ND96isr_H100_v5": 8, "Standard_ND96is_H100_v5": 8}
"""Azure's table says 12: its own page, https://learn.microsoft.com/azure/virtual-machines/sizes, 8."""
_ON_HOSTS = {"T4": "n1-standard-8", "V100": "n1-standard-8"}
"""Google attaches these to machines of one's choice."""
_WHOLE = re.compile(r"a2-(?:high|mega|ultra)gpu-(\d+)g|a3-(?:high|edge|mega|ultra)gpu-(\d+)g|a4-highgpu-(\d+)g")

Row = Mapping[str, str]


def read_table(text: str, provider: str, on: Date | None, source: str) -> list[Offer]:
    """The instances with known cards.

    Args:
        provider: that the table is of: "aws", "gcp", "azure", or another's name.
        on: the date of its prices, if that is known.

    Raises:
        InputError: it is no such table.
    """
    table = csv.DictReader(io.StringIO(text))
    missing = _NEEDED - set(table.fieldnames or ())
    if missing:
        cause = f"it has no column {', '.join(sorted(missing))}"
        raise InputError(f"{source} is no table of SkyPilot's catalog", cause, "--refresh vms.csv of one cloud")
    try:
        rows = list(table)
        if torn := next((number for number, row in enumerate(rows, 2) if None in row.values()), 0):
            raise ValueError(f"line {torn} ends early")
        joined = any(not row["InstanceType"] for row in rows)
        found = _joined(rows) if joined else _plain(rows)
        return [
            Offer(provider, instance, region, zone, card, gpus, cpus, memory, price, spot, on, source)
            for instance, region, zone, card, gpus, cpus, memory, price, spot in found
        ]
    except (ValueError, csv.Error) as error:
        raise InputError(f"{source} cannot be read", str(error), "--refresh vms.csv of one cloud") from None


_Found = tuple[str, str, str, str, int, float, float, float | None, float | None]


def _plain(rows: list[dict[str, str]]) -> Iterator[_Found]:
    """Tables whose rows are whole instances."""
    for row in rows:
        instance, count = row["InstanceType"], _number(row["AcceleratorCount"]) or 0.0
        card = _card(row["AcceleratorName"], instance)
        gpus = _MISCOUNTED.get(instance, int(count))
        if card and count >= 1:
            cpus, memory = _number(row.get("vCPUs", "")) or 0.0, _number(row.get("MemoryGiB", "")) or 0.0
            price, spot = _number(row["Price"]), _number(row["SpotPrice"])
            yield instance, row["Region"], row.get("AvailabilityZone", ""), card, gpus, cpus, memory, price, spot


def _joined(rows: list[dict[str, str]]) -> Iterator[_Found]:
    """Google's: a machine and its GPUs, both of the same zone."""
    machines = {(row["InstanceType"], _place(row)): row for row in rows if row["InstanceType"]}
    by_place: dict[tuple[str, str], list[Row]] = {}
    for row in machines.values():
        by_place.setdefault(_place(row), []).append(row)
    for row in rows:
        card, count = _card(row["AcceleratorName"], ""), _number(row["AcceleratorCount"]) or 0.0
        if row["InstanceType"] or not card or count < 1:
            continue
        for machine in by_place.get(_place(row), []):
            name = machine["InstanceType"]
            if not _carries(name, row["AcceleratorName"], int(count)):
                continue
            price, spot = _number(row["Price"]), _number(row["SpotPrice"])
            # In some regions the table has a lower rate in place of the price on demand.
            whole = _sum(_number(machine["Price"]), price) if price and (not spot or price > spot) else None
            label = f"{name}+{int(count)}x{card}" if name == _ON_HOSTS.get(row["AcceleratorName"]) else name
            yield (
                label, row["Region"], row.get("AvailabilityZone", ""), card, int(count),
                _number(machine.get("vCPUs", "")) or 0.0, _number(machine.get("MemoryGiB", "")) or 0.0, whole,
                _sum(_number(machine["SpotPrice"]), spot),
            )  # fmt: skip


def _place(row: Row) -> tuple[str, str]:
    return row["Region"], row.get("AvailabilityZone", "")


def _carries(machine: str, accelerator: str, count: int) -> bool:
    """Whether a machine of Google's has so many of these."""
    if accelerator in _ON_HOSTS:
        return machine == _ON_HOSTS[accelerator] and count in (1, 2, 4, 8)
    if accelerator == "L4":
        number = {"24": 2, "48": 4, "96": 8}.get(machine.removeprefix("g2-standard-"), 1)
        return machine.startswith("g2-standard-") and number == count
    kinds = {
        "A100": ("a2-highgpu", "a2-megagpu"), "A100-80GB": ("a2-ultragpu",), "H100": ("a3-highgpu", "a3-edgegpu"),
        "H100-MEGA": ("a3-megagpu",), "H200": ("a3-ultragpu",), "B200": ("a4-highgpu",),
    }  # fmt: skip
    found = _WHOLE.fullmatch(machine)
    size = next((part for part in found.groups() if part), "") if found else ""
    return machine.rsplit("-", 1)[0] in kinds.get(accelerator, ()) and size == str(count)


def _card(accelerator: str, instance: str) -> str:
    if accelerator == "H100":
        for pattern, card in _VARIANTS:
            if re.match(pattern, instance):
                return card
    name = _CARDS.get(accelerator, accelerator)
    return name if name in cards() else ""


def _number(text: str) -> float | None:
    """None for what is not told, which some tables write as 0."""
    value = float(text or 0)
    if not 0 <= value < float("inf"):
        raise ValueError(f"{text} is no price and no count")
    return value or None


def _sum(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else round(one + other, 6)
