"""Cards that a training can be planned for: memory, rates, links; data of the package."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib import resources
from typing import Any

from hotloop.core.errors import InputError
from hotloop.doctor.expect import rates_of

_MIB = 2**20
_TFLOPS, _GB = 1e12, 1e9


@dataclass(frozen=True)
class Card:
    """A GPU, as far as a plan needs it.

    Attributes:
        key: "A100-80GB".
        memory_bytes: as the driver tells.
        rates: FLOP/s of a large matrix product, by precision.
        memory_rate: bytes a second that copies on the card read and write.
        link_rate: bytes a second that a GPU sends in an all-reduce within a machine.
        precisions: that its matrix units have.
        source: where the rates are from.
    """

    key: str
    name: str
    memory_bytes: int
    rates: Mapping[str, float]
    memory_rate: float
    link_rate: float
    precisions: tuple[str, ...]
    source: str

    @property
    def precision(self) -> str:
        """That "auto" takes."""
        return "bf16" if "bf16" in self.precisions else "fp16"


@cache
def table() -> dict[str, Any]:
    """The file, with `reached`, `allowances` and `card`."""
    return tomllib.loads(resources.files("hotloop.plan").joinpath("cards.toml").read_text())


@cache
def cards() -> dict[str, Card]:
    """All of them, by key."""
    return {row["key"]: _card(row) for row in table()["card"]}


def card_named(text: str) -> Card:
    """By key ("H100") or by the name that nvidia-smi shows.

    Raises:
        InputError: there is no such card.
    """
    known = cards()
    names = {key.lower(): card for key, card in known.items()} | {card.name.lower(): card for card in known.values()}
    if text.lower() in names:
        return names[text.lower()]
    begun = [name for name in names if name.startswith(text.lower())] if text else []
    near = begun or get_close_matches(text.lower(), names, n=3, cutoff=0.4)
    cause = f"the nearest are {', '.join(dict.fromkeys(names[name].key for name in near))}" if near else ""
    raise InputError(
        f'unknown card "{text}"', cause or f"there are {', '.join(known)}",
        f"--card {names[near[0]].key if near else 'H100'}",
    )  # fmt: skip


def _card(row: Mapping[str, Any]) -> Card:
    reached = table()["reached"]
    if "sheet" in row:
        rates = {name: row["held"] * value for name, value in row["sheet"].items() if name != "memory"}
        memory, source = 0.83 * row["sheet"]["memory"], f"data sheet, of which {row['held']:.0%} are held"
    else:
        rates, source = rates_of(row["name"])
        memory = rates.pop("memory")
    rates = {name: _TFLOPS * value for name, value in rates.items()}
    rates.setdefault("bf16", rates["fp16"])
    rates.setdefault("tf32", rates["fp32"])
    if "float8" in row["precisions"]:
        rates["float8"] = 1.5 * rates["bf16"]  # twice by the data sheets; scaling costs what is not planned
    link = _GB * (reached["link"] * row["link"] if "link" in row else reached["pcie"])
    return Card(
        row["key"], row["name"], row["memory"] * _MIB, rates, _GB * memory, link, tuple(row["precisions"]), source
    )
