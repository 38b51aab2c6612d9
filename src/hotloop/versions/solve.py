"""From a driver, cards, Python and wishes to the build of torch that runs, or to why there is none."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from hotloop.versions.table import Build, Capability, Table

Verdict = Literal["full", "limited", "unsupported", ""]

_TEGRA = {(3, 2), (5, 3), (6, 2), (7, 2), (8, 7), (8, 8), (10, 1), (11, 0)}
"""Processors with a GPU inside: they and cards do not run each other's machine code."""


@dataclass(frozen=True)
class Wish:
    """What is there, and what is wanted. What is empty is not asked about.

    Attributes:
        driver: "535.104.05".
        cards: capabilities of all of them.
        python: "3.11".
        torch: a specifier, ">=2.8".
        cuda: a version or the beginning of one, "12".
        glibc: "2.31".
    """

    driver: str = ""
    cards: tuple[Capability, ...] = ()
    python: str = ""
    torch: str = ""
    cuda: str = ""
    glibc: str = ""
    processor: str = "x86_64"


@dataclass(frozen=True)
class Solution:
    """A build that runs.

    Attributes:
        verdict: of the driver; "limited" runs all but PTX; empty if no driver was named.
        notes: what is to be known about it.
    """

    build: Build
    verdict: Verdict
    notes: tuple[str, ...]

    @property
    def install(self) -> str:
        """What to type."""
        packages = f"torch=={self.build.torch} torchvision=={self.build.torchvision}"
        if self.build.default:
            return f"pip install {packages}"
        return f"uv pip install {packages} --torch-backend=cu{self.build.cuda.replace('.', '')}"


@dataclass(frozen=True)
class Change:
    """What would have to be different, and what could be installed then."""

    text: str
    solution: Solution


@dataclass(frozen=True)
class Impossible:
    """There is no such build.

    Attributes:
        reasons: why not, in a line each.
        changes: that would help, each with the newest torch that it allows.
    """

    reasons: tuple[str, ...]
    changes: tuple[Change, ...]


def solve(wish: Wish, table: Table) -> Solution | Impossible:
    """The newest torch that fits; of its builds the one that the driver runs best, then pip's own."""
    found = _fitting(wish, table)
    if found:
        return found[0]
    return Impossible(tuple(_reasons(wish, table)), tuple(_changes(wish, table)))


def _reasons(wish: Wish, table: Table) -> list[str]:
    """What rules out every build by itself; if nothing does, one reason of each kind with how many it rules out."""
    builds = [build for build in table.builds if build.processor == wish.processor]
    wanted = [build for build in builds if not {"torch", "cuda"} & obstacles(build, wish, table).keys()]
    builds = wanted or builds
    met: dict[str, list[str]] = {}
    for build in builds:
        for kind, reason in obstacles(build, wish, table).items():
            met.setdefault(kind, []).append(reason)
    # The oldest build, the last one, asks for the least of a driver and of the C library.
    told = {kind: reasons[-1 if kind in ("driver", "glibc") else 0] for kind, reasons in met.items()}
    if apart := _apart(wish, table):
        told["card"] = apart
    alone = [told[kind] for kind, reasons in met.items() if len(reasons) == len(builds)]
    some = sorted(met, key=lambda kind: -len(met[kind]))
    return alone or [f"{told[kind]} ({len(met[kind])} of {len(builds)} builds are ruled out so)" for kind in some]


def _apart(wish: Wish, table: Table) -> str:
    """Which torch each of several cards would have for itself; "" if one has none."""
    found = {card: _fitting(replace(wish, cards=(card,)), table) for card in wish.cards}
    if len(found) < 2 or not all(found.values()):
        return ""
    each = "; ".join(f"{_named(card, table)} has {_build(one[0])} at the newest" for card, one in found.items())
    return f"no torch holds code for all of these cards: {each}"


def _build(found: Solution) -> str:
    return f"torch {found.build.torch} for CUDA {found.build.cuda}"


def _fitting(wish: Wish, table: Table) -> list[Solution]:
    fitting = [
        Solution(build, verdict(build, wish, table), tuple(_notes(build, wish, table)))
        for build in table.builds
        if build.processor == wish.processor and not obstacles(build, wish, table)
    ]

    def order(one: Solution) -> tuple[Version, bool, bool, Version]:
        return Version(one.build.torch), one.verdict == "full", one.build.default, Version(one.build.cuda)

    return sorted(fitting, key=order, reverse=True)


def verdict(build: Build, wish: Wish, table: Table) -> Verdict:
    """Of the driver for a build's CUDA."""
    cuda = table.cudas[build.cuda]
    if not wish.driver:
        return ""
    if _at_least(wish.driver, cuda.paired_driver):
        return "full"
    return "limited" if _at_least(wish.driver, cuda.least_driver) else "unsupported"


def _at_least(driver: str, needed: str) -> bool:
    """Of a driver that is named shorter, 580 or 580.65, by what is named."""
    release = Version(driver).release
    return release >= Version(needed).release[: len(release)]


def runs(build: Build, card: Capability) -> Literal["binary", "ptx", ""]:
    """How a card runs a build's kernels: machine code, PTX that the driver compiles, or not at all."""
    lower = [own for own in build.binaries if own[0] == card[0] and own <= card and own not in _TEGRA]
    if card in build.binaries or (lower and card not in _TEGRA):
        return "binary"
    return "ptx" if any(own <= card for own in build.ptx) else ""


def obstacles(build: Build, wish: Wish, table: Table) -> dict[str, str]:
    """Why a build does not do, by what it is about: driver, card, python, torch, cuda or glibc."""
    found = {}
    cuda, how = table.cudas[build.cuda], verdict(build, wish, table)
    if how == "unsupported":
        found["driver"] = f"CUDA {build.cuda} needs a driver from {cuda.least_driver}; this one is {wish.driver}"
    unknown: list[str] = []
    without: list[str] = []
    for card in wish.cards:
        name, by = _named(card, table), runs(build, card)
        if card not in table.cards.values():
            unknown.append(name)
        elif not by:
            without.append(name)
        if by == "ptx" and how == "limited":
            found["driver"] = (
                f"torch {build.torch} holds PTX alone for {name}, which drivers compile from {cuda.paired_driver}"
            )
    if without:
        found["card"] = f"torch {build.torch} for CUDA {build.cuda} holds no code for {' and '.join(without)}"
    if unknown:
        found["card"] = f"the table has no card of {' and '.join(unknown)}"
    if branch := _branch_obstacle(wish, table):
        found["card and driver"] = branch
    minor = _minor(wish.python)
    if minor is not None and not build.pythons[0] <= minor <= build.pythons[1]:
        found["python"] = f"torch {build.torch} is for Python 3.{build.pythons[0]} to 3.{build.pythons[1]}"
    if wish.torch and not SpecifierSet(wish.torch).contains(build.torch):
        found["torch"] = f"torch {wish.torch} was asked for"
    if wish.cuda and Version(build.cuda).release[: len(Version(wish.cuda).release)] != Version(wish.cuda).release:
        found["cuda"] = f"CUDA {wish.cuda} was asked for"
    if wish.glibc and Version(wish.glibc) < Version(build.glibc):
        found["glibc"] = f"torch {build.torch} needs glibc {build.glibc}; this one is {wish.glibc}"
    return found


def _minor(python: str) -> int | None:
    return Version(python).minor if python else None


def _named(card: Capability, table: Table) -> str:
    architecture = table.architecture(card)
    number = f"compute capability {card[0]}.{card[1]}"
    return f"{architecture.name} ({number})" if architecture else number


def _branches(wish: Wish, table: Table) -> tuple[int, int | None]:
    """First and last branch of the drivers that know all cards."""
    known = [one for card in wish.cards if (one := table.architecture(card))]
    last = [one.last_branch for one in known if one.last_branch]
    return max((one.first_branch for one in known), default=0), min(last, default=None)


def _branch_obstacle(wish: Wish, table: Table) -> str:
    first, last = _branches(wish, table)
    if last and first > last:
        return f"no driver knows all of these cards: one needs branch {first}, another's last one is {last}"
    for card in wish.cards if wish.driver else ():
        architecture, branch = table.architecture(card), Version(wish.driver).major
        if architecture and branch < architecture.first_branch:
            known = f"drivers know {_named(card, table)} from branch {architecture.first_branch}"
            return f"{known}; this one is {wish.driver}"
        if architecture and architecture.last_branch and branch > architecture.last_branch:
            known = f"branch {architecture.last_branch} is the last driver for {_named(card, table)}"
            return f"{known}; this one is {wish.driver}"
    return ""


def _notes(build: Build, wish: Wish, table: Table) -> list[str]:
    notes = [build.note] if build.note else []
    cuda = table.cudas[build.cuda]
    if not wish.driver:
        notes.append(f"it needs a driver from {cuda.least_driver}, and from {cuda.paired_driver} for its PTX")
    if verdict(build, wish, table) == "limited":
        paired = cuda.paired_driver
        notes.append(f"the driver is older than {paired}, CUDA {build.cuda}'s own: PTX of that CUDA fails (error 222)")
    if any(runs(build, card) == "ptx" for card in wish.cards):
        notes.append("the card's kernels are compiled by the driver at the first start, which takes minutes")
    for card in wish.cards:
        architecture = table.architecture(card)
        if architecture and architecture.last_branch:
            notes.append(f"{architecture.name}'s last driver branch is {architecture.last_branch}")
    return list(dict.fromkeys(notes))


_WISHES = {
    "torch": "another torch",
    "cuda": "another CUDA",
    "python": "another Python",
    "glibc": "a newer glibc",
    "driver": "another driver",
    "cards": "another card",
}
"""Fields of a wish that can be let go of, in words."""


def _changes(wish: Wish, table: Table) -> list[Change]:
    """Each field let go of by itself; if that does not help, two of them."""
    asked = [name for name in _WISHES if getattr(wish, name)]
    for number, most in ((1, len(asked)), (2, 3)):
        ways = {names: _without(wish, names) for names in combinations(asked, number)}
        helping = [(names, way, found[0]) for names, way in ways.items() if (found := _fitting(way, table))]
        if helping:
            return [Change(_told(names, way, found, table), found) for names, way, found in helping[:most]]
    return []


def _without(wish: Wish, names: Sequence[str]) -> Wish:
    return replace(wish, **{name: getattr(Wish(), name) for name in names})


def _told(names: Sequence[str], wish: Wish, found: Solution, table: Table) -> str:
    """What there has to be in place of the fields that were let go of."""
    build = found.build
    first, last = _branches(wish, table)
    least = max(table.cudas[build.cuda].least_driver, str(first or 0), key=Version)
    until = f", of branch {last} at most" if last else ""
    needed = {
        "driver": f"a driver from {least}{until}",
        "python": f"Python 3.{build.pythons[0]} to 3.{build.pythons[1]}",
        "glibc": f"glibc {build.glibc}",
    }
    detail = ", ".join(text for name, text in needed.items() if name in names)
    words = " and ".join(_WISHES[name] for name in names)
    return f"with {words}{f' ({detail})' if detail else ''}: {_build(found)}"
