"""The arithmetic of an out-of-memory message: too small, in pieces, or taken by another process."""

import re
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hotloop.explain.decide import Found
    from hotloop.explain.scan import Match

_UNITS = {
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "bytes": 1,
}
_SIZE = r"(\d+(?:\.\d+)?) ?(KiB|MiB|GiB|TiB|KB|MB|GB|bytes)"
_ASKED = re.compile(rf"Tried to allocate {_SIZE}")
_TOTAL = re.compile(rf"(?:total capacity of {_SIZE}|{_SIZE} total capacity)")
_FREE = re.compile(rf"(?:of which {_SIZE} is free|{_SIZE} free)")
_UNUSED = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")
_ALLOCATED = re.compile(rf"(?:{_SIZE} is allocated by PyTorch|{_SIZE} already allocated)")
_RESERVED = re.compile(rf"{_SIZE} reserved in total by PyTorch")
_OURS = re.compile(rf"this process has {_SIZE} memory in use")
_MOST, _PIECES = 0.5, 0.1
"""Of the card: what others have, and what lies unused in pieces, to be the reason."""


def refined(found: "Found", match: "Match") -> "Found":
    """An out-of-memory cause told apart by its own numbers; any other as it is."""
    if found.id != "cuda-out-of-memory":
        return found
    text = " ".join([match.line.text, *(line.text for line in match.after[:3])])
    sizes = {
        name: _bytes(pattern, text)
        for name, pattern in {
            "asked": _ASKED, "total": _TOTAL, "free": _FREE, "unused": _UNUSED, "allocated": _ALLOCATED,
            "reserved": _RESERVED, "ours": _OURS,
        }.items()
    }  # fmt: skip
    asked, total = sizes["asked"], sizes["total"]
    unused = sizes["unused"]
    if unused is None and sizes["reserved"] is not None and sizes["allocated"] is not None:
        unused = sizes["reserved"] - sizes["allocated"]
    # In a container torch lists its own process among the others, by the host's number: what it has itself is known.
    ours = sizes["ours"] or (
        sizes["allocated"] + (unused or 0.0) if sizes["allocated"] is not None else sizes["reserved"]
    )
    others = total - sizes["free"] - ours if total and sizes["free"] is not None and ours is not None else 0.0
    if total and others > _MOST * total:
        note = f"others have {_gib(others)} of {_gib(total)}"
        return replace(found, id="cuda-oom-other-process", notes=(note,))
    if asked and unused is not None and unused >= max(asked, _PIECES * (total or 0.0)):
        note = f"{_gib(unused)} are reserved and not used, {_gib(asked)} were asked for: no piece was as large"
        return replace(found, id="cuda-oom-fragmentation", notes=(note,))
    if asked and total and sizes["free"] is not None:
        note = f"{_gib(asked)} were asked for, {_gib(sizes['free'])} of {_gib(total)} were free"
        return replace(found, notes=(note,))
    return found


def _bytes(pattern: re.Pattern[str], text: str) -> float | None:
    found = pattern.search(text)
    return _size([group for group in found.groups() if group]) if found else None


def _size(groups: "list[str] | tuple[str, ...]") -> float:
    return float(groups[0]) * _UNITS[groups[1]]


def _gib(size: float) -> str:
    return f"{size / (1 << 30):.2f} GiB"
