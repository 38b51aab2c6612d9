"""The causes that are known, and how logs tell of them: `causes.toml`."""

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from re._constants import BRANCH, LITERAL, MAX_REPEAT, SUBPATTERN  # type: ignore[import-not-found]
from typing import Any, Literal

Strength = Literal["sure", "likely", "vague"]
_SHORTEST = 2
"""Of an anchor: "^C"."""
STRENGTHS: tuple[Strength, ...] = ("sure", "likely", "vague")


@dataclass(frozen=True)
class Pattern:
    """How a log tells of a cause.

    Attributes:
        anchors: texts of which a line must hold one; searched for before the expression is tried.
    """

    cause: str
    strength: Strength
    expression: re.Pattern[str]
    anchors: tuple[bytes, ...]


@dataclass(frozen=True)
class Cause:
    """A cause.

    Attributes:
        quiet: the run goes on with it, slower or to no use.
        findings: ids of the doctor's that tell whether this machine has it.
        leads_to: causes that come of it: at the restart, at the other ranks, while the run shuts down.
    """

    id: str
    area: str
    title: str
    why: str
    fix: str
    quiet: bool = False
    findings: tuple[str, ...] = ()
    leads_to: tuple[str, ...] = ()


@cache
def _raw() -> dict[str, dict[str, object]]:
    return tomllib.loads(resources.files("hotloop.explain").joinpath("causes.toml").read_text())


@cache
def causes() -> dict[str, Cause]:
    """By id."""
    found = {}
    for id_, entry in _raw().items():
        fields = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in entry.items()
            if key not in STRENGTHS
        }
        found[id_] = Cause(id=id_, **fields)  # type: ignore[arg-type]
    return found


@cache
def patterns() -> tuple[Pattern, ...]:
    """All of them."""
    return tuple(
        Pattern(id_, strength, _compiled(text), tuple(one.encode() for one in anchors(text)))
        for id_, entry in _raw().items()
        for strength in STRENGTHS
        for text in entry.get(strength, ())  # type: ignore[attr-defined]
    )


def _compiled(text: str) -> re.Pattern[str]:
    """Without repeats that have no end: several of them in one expression take minutes for a long line."""
    return re.compile(text.replace(".*", ".{0,200}"), re.MULTILINE)


def anchors(expression: str) -> tuple[str, ...]:
    """Texts of which every match holds one: the longest literal part, or one of each alternative.

    Raises:
        ValueError: there is none, so that each line of a log would have to be tried.
    """
    found = _longest(re._parser.parse(expression))  # type: ignore[attr-defined]  # the same in 3.11 to 3.14
    if not found or min(map(len, found)) < _SHORTEST:
        raise ValueError(f"no literal part in {expression}")
    return found


def _longest(items: Iterable[tuple[Any, Any]]) -> tuple[str, ...]:
    """Of a parsed expression; () if nothing has to be there as it is written."""
    found: list[tuple[str, ...]] = []
    run = ""
    for kind, value in [*items, (None, None)]:
        if kind is LITERAL:
            run += chr(value)
            continue
        if run:
            found.append((run,))
            run = ""
        if kind is SUBPATTERN or (kind is MAX_REPEAT and value[0] > 0):
            found.append(_longest(value[-1]))
        elif kind is BRANCH:
            each = [_longest(branch) for branch in value[1]]
            found.append(tuple(text for texts in each for text in texts) if all(each) else ())
    return max(filter(None, found), key=lambda texts: min(map(len, texts)), default=())
