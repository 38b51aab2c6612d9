"""Findings, and the catalogue of all that there may be."""

import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Literal

from hotloop.doctor.record import MachineRecord

Level = Literal["error", "warning", "note"]
LEVELS: tuple[Level, ...] = ("error", "warning", "note")
GROUPS = {
    "driver": "Driver",
    "cards": "GPUs",
    "links": "Links",
    "packages": "Python packages",
    "limits": "Container and limits",
    "storage": "Storage",
    "network": "Network",
    "environment": "Environment variables",
    "security": "Security",
    "clock": "Time and locale",
    "probes": "Probes",
}
"""In the order in which they are shown."""


@dataclass(frozen=True)
class Known:
    """An entry of the catalogue.

    Attributes:
        title: what is wrong, in a line.
        why: what it does, and how it comes about.
        fix: what to type, as a rule; a finding may know better.
    """

    id: str
    group: str
    level: Level
    title: str
    why: str
    fix: str


@dataclass(frozen=True)
class Seen:
    """What a check saw.

    Attributes:
        evidence: with the values.
        fix: with this machine's values; "" for the catalogue's.
        gpu: the card it is about: its number takes the place of N in the fix.
    """

    id: str
    evidence: str
    fix: str = ""
    gpu: int | None = None


Check = Callable[[MachineRecord], Iterator[Seen]]


@dataclass(frozen=True)
class Finding:
    """Something to be told."""

    id: str
    group: str
    level: Level
    title: str
    evidence: str
    fix: str


@cache
def catalogue() -> dict[str, Known]:
    """By id."""
    raw = tomllib.loads(resources.files("hotloop.doctor").joinpath("catalogue.toml").read_text())
    return {id_: Known(id_, **entry) for id_, entry in raw.items()}


def finding(seen: Seen) -> Finding:
    """What was seen, with what the catalogue says of it."""
    known = catalogue()[seen.id]
    fix = seen.fix or known.fix
    if seen.gpu is not None:
        fix = fix.replace("-i N", f"-i {seen.gpu}")
    return Finding(seen.id, known.group, known.level, known.title, seen.evidence, fix)
