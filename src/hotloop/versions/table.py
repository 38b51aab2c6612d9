"""The table: builds of torch, cards, and which drivers run them. Data of the package, with its sources."""

import json
import re
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from hotloop.core.errors import InputError
from hotloop.core.files import user_cache

Capability = tuple[int, int]
"""Of a card: (9, 0) for an H100."""


@dataclass(frozen=True)
class Build:
    """Wheels of torch for one CUDA.

    Attributes:
        cuda: "12.8".
        default: whether it is the one that `pip install torch` takes on this kind of processor.
        pythons: first and last minor version of Python 3.
        cudnn, nccl, triton: that the wheel asks for or holds; empty where that is not known.
        binaries: capabilities that it holds machine code for.
        ptx: capabilities that it holds PTX for, which the driver compiles for later cards.
        glibc: the least that its wheels run with.
        processor: "x86_64" or "aarch64".
        source: where the row comes from, with its date.
        note: what in it was concluded and not read, for whoever is given the row.
    """

    torch: str
    cuda: str
    default: bool
    pythons: tuple[int, int]
    torchvision: str
    cudnn: str
    nccl: str
    triton: str
    binaries: tuple[Capability, ...]
    ptx: tuple[Capability, ...]
    glibc: str
    processor: str
    source: str
    note: str = ""


@dataclass(frozen=True)
class Cuda:
    """A CUDA toolkit.

    Attributes:
        least_driver: below this nothing runs.
        paired_driver: that it was released with; below, PTX of this toolkit is not compiled.
    """

    version: str
    least_driver: str
    paired_driver: str


@dataclass(frozen=True)
class Architecture:
    """Cards that drivers begin and cease to support together.

    Attributes:
        first_branch, last_branch: of drivers; no last one while it is supported.
    """

    name: str
    capabilities: tuple[Capability, ...]
    first_branch: int
    last_branch: int | None
    source: str


@dataclass(frozen=True)
class Table:
    """All of it."""

    builds: tuple[Build, ...]
    cudas: dict[str, Cuda]
    architectures: tuple[Architecture, ...]
    cards: dict[str, Capability]
    date: str

    def architecture(self, capability: Capability) -> Architecture | None:
        """That of a card; None if it is not in the table."""
        return next((one for one in self.architectures if capability in one.capabilities), None)

    def capability(self, card: str) -> Capability:
        """Of a card by its name: as NVIDIA writes it, shorter ("4090"), or with more ("A100-SXM4-40GB MIG 1g.5gb").

        Raises:
            InputError: there is none of that name, or cards of several capabilities are called so.
        """
        known = {_words(name): name for name in self.cards}
        asked = _words(card)
        names = any(re.search(r"\d|titan", word) and not _FORM.match(word) for word in asked)
        longer = [name for words, name in known.items() if names and set(asked) <= set(words)]
        shorter = [(len(words), name) for words, name in known.items() if set(words) <= set(asked)]
        most = max(shorter, default=(0, ""))[0]
        found = [known[asked]] if asked in known else longer or [name for length, name in shorter if length == most]
        if len({self.cards[name] for name in found}) == 1:
            return self.cards[found[0]]
        if found:
            each = ", ".join(f"{name} ({_dotted(self.cards[name])})" for name in found[:5])
            raise InputError(f'"{card}" may be several cards', each, f'--gpu "{found[0]}"')
        if _OTHERS.search(card):
            raise InputError(
                f'"{card}" is no card of NVIDIA\'s', "the table has CUDA's builds alone", "--gpu H100, say"
            )
        texts = {" ".join(words): name for words, name in known.items()}
        near = [texts[text] for text in get_close_matches(" ".join(asked), texts, n=5, cutoff=0.4)]
        cause = f"the nearest: {', '.join(near)}" if near else "no name is near it"
        raise InputError(f'"{card}" is no card that the table has', cause, "--sm gives its compute capability: --sm 90")


_OTHERS = re.compile(r"\b(AMD|Radeon|Instinct|MI\d{2,3}[A-Z]?|RX \d{4}|Intel|Arc|Gaudi)\b", re.IGNORECASE)
"""Cards of other makers, whose names would be found near some of NVIDIA's."""
_WITH_ARM = re.compile(r"\b(GH200|GB200|GB300|GB10|Jetson|Orin|Xavier|Thor|Tegra|DGX Spark)\b", re.IGNORECASE)


def has_arm(card: str) -> bool:
    """Whether a card is sold with an Arm processor in one module: GH200, GB200, a Jetson."""
    return bool(_WITH_ARM.search(card))


def _dotted(capability: Capability) -> str:
    return f"{capability[0]}.{capability[1]}"


def _words(name: str) -> tuple[str, ...]:
    """Of a name as anybody writes it: "rtx4090", "GTX_1080Ti", "TITAN X (Pascal)"."""
    text = re.sub(r"\b(rtx|gtx|gt|mx|titan)(\d)", r"\1 \2", re.sub(r"[-_()]", " ", name.lower()))
    text = re.sub(r"(\d{3,4})(ti|super)\b", r"\1 \2", text)
    return tuple(word for word in text.split() if word not in ("nvidia", "tesla", "geforce", "gpu"))


_FORM = re.compile(r"(sxm|nvl|pcie|\d+g)")
"""Words that tell how a card is built, and not which one it is."""


def version_of(text: str, what: str, example: str) -> Version:
    """A version that somebody typed, with an example of what would be one.

    Raises:
        InputError: it is none.
    """
    try:
        return Version(text)
    except InvalidVersion:
        raise InputError(
            f'{what} "{text}" is no version', "numbers with dots between them", f"{what} {example}"
        ) from None


def specifier_of(text: str) -> str:
    """What was typed of a wanted version, "2.11" or ">=2.8,<2.12", as a specifier; empty stays empty.

    Raises:
        InputError: it is none.
    """
    if not text:
        return ""
    specifier = text if text[0] in "<>=!~" else f"=={text}.*" if text.count(".") < 2 else f"=={text}"
    try:
        return str(SpecifierSet(specifier))
    except InvalidSpecifier:
        raise InputError(f'--torch "{text}" is no version', "as pip takes it", '--torch ">=2.8"') from None


def capability_of(text: str) -> Capability:
    """A compute capability: "90", "9.0" or "sm_90".

    Raises:
        InputError: it is none.
    """
    digits = text.removeprefix("sm_").replace(".", "")
    if not digits.isdigit() or not 2 <= len(digits) <= 3:
        raise InputError(f'--sm "{text}" is no compute capability', "two numbers, as of an H100: 9.0", "--sm 90")
    return int(digits[:-1]), int(digits[-1])


@cache
def shipped_table() -> Table:
    """The one that comes with the package."""
    return read_table(resources.files("hotloop.versions").joinpath("table.json").read_text())


def refreshed_file() -> Path | None:
    """Where a refreshed table is kept; None if there is no place for one."""
    cache = user_cache()
    return cache / "versions.json" if cache else None


def current_table() -> Table:
    """The refreshed one if there is one that is not older than the package's."""
    shipped, file = shipped_table(), refreshed_file()
    try:
        refreshed = read_table(file.read_text()) if file else shipped
        return refreshed if refreshed.date >= shipped.date else shipped
    except Exception:  # there is none, or it is of another version of hotloop, whatever that trips over
        return shipped


def read_table(text: str) -> Table:
    """A table as it is written down."""
    raw: dict[str, Any] = json.loads(text)
    builds = [
        Build(**{**row, "pythons": tuple(row["pythons"]), "binaries": _capabilities(row["binaries"]),
                 "ptx": _capabilities(row["ptx"])})
        for row in raw["builds"]
    ]  # fmt: skip
    architectures = [
        Architecture(**{**row, "capabilities": _capabilities(row["capabilities"])}) for row in raw["architectures"]
    ]
    cards = {name: capability_of(text) for name, text in raw["cards"].items()}
    cudas = {row["version"]: Cuda(**row) for row in raw["cudas"]}
    return Table(tuple(builds), cudas, tuple(architectures), cards, raw["date"])


def _capabilities(texts: list[str]) -> tuple[Capability, ...]:
    return tuple(capability_of(text) for text in texts)
