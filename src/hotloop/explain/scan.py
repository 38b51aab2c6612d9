"""A log of any length, read once in blocks: the lines that tell of causes, with what follows them, and its end."""

import codecs
import re
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate, islice
from typing import BinaryIO

from hotloop.explain.causes import Pattern, Strength, patterns
from hotloop.explain.lines import Line, holds_lines, line_of, message_lines

_BLOCK = 4 << 20
_AFTER_BYTES = 24 << 10
"""Of each match that are looked at, to see whether the run went on."""
_AFTER_LINES = 80
_BEFORE_LINES = 30
_TAIL_BYTES = 96 << 10
_LONGEST = 16_000
_MOST_MATCHES, _MOST_TRACEBACKS = 40, 100
"""Of a pattern, and at all: what comes later is not the first cause."""
_ENDLESS = 8 << 20
_MOST_SEEN = 500_000
"""Lines of different kinds that are remembered, by their hashes: some 50 MB."""
_TRACEBACK = Pattern("unknown", "vague", re.compile(""), (b"",))
_WIDE = {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
_SAMPLE = 16 << 10
_WIDE_ZEROS, _ODD = 0.3, 0.01
"""Of bytes in every other place, to be UTF-16 without its mark; of characters that no text has, to be none."""
_IN_TEXT = "\t\n\r\x1b\b\f"
EXCEPTION = re.compile(
    r"^(?:(?:[A-Za-z_]\w*\.)*[A-Za-z_]*(?:Error|Exception|Exit|Warning|Interrupt)|(?:[a-z_]\w*\.)+[A-Z]\w+)\b(?:: |$)"
)
"""The line that ends a traceback."""


@dataclass(frozen=True)
class Match:
    """A line that tells of a cause, and what stands around it.

    Attributes:
        specific: how long the words are that it must hold.
    """

    cause: str
    strength: Strength
    specific: int
    line: Line
    before: tuple[Line, ...]
    after: tuple[Line, ...]


@dataclass
class Scan:
    """What was seen in a log.

    Attributes:
        matches: in the order of the file, as far as they can be the first cause.
        tail: its last lines.
        size: bytes.
    """

    matches: list[Match] = field(default_factory=list)
    tail: list[Line] = field(default_factory=list)
    exceptions: list[Match] = field(default_factory=list)
    lines: int = 0
    size: int = 0


def scan(file: BinaryIO) -> Scan:
    """Read a log, in memory of a few blocks.

    Lines that differ from earlier ones by numbers alone, hexadecimal ones too, are not looked at again, but for those
    at the end: 640 patterns take minutes for a gigabyte, and training writes the same line a million times.
    """
    found, seen, opened, counts = Scan(), set[int](), set[int](), Counter[Pattern]()
    tail: deque[bytes] = deque()
    for text, until, first_line in _windows(file, found):
        window = _Window(text, until, first_line, opened)
        _look(window, window.fresh(seen), found, counts)
        tail.append(text[:until])
        while len(tail) > 1 and sum(map(len, tail)) - len(tail[0]) > _TAIL_BYTES:
            tail.popleft()
    end = b"".join(tail)[-_TAIL_BYTES:]
    window = _Window(end, len(end), found.lines - end.removesuffix(b"\n").count(b"\n"), set())
    _look(window, window.fresh(set()), found, Counter())
    found.tail = [line for place in range(window.count) if (line := window.line(place)).text]
    found.matches = sorted(set(found.matches), key=lambda match: (match.line.place, match.cause))
    return found


def _look(window: "_Window", fresh: Sequence[int], found: Scan, counts: Counter[Pattern]) -> None:
    """Search lines of a window for what tells of causes, and the window for tracebacks."""
    text = b"\n".join(window.raw(place) for place in fresh)
    starts = list(accumulate((len(window.raw(place)) + 1 for place in fresh), initial=0))
    for anchor, those in _by_anchor().items():
        at = text.find(anchor)
        while at >= 0:
            index = bisect_right(starts, at) - 1
            left = [pattern for pattern in those if counts[pattern] < _MOST_MATCHES]
            if not left:
                break
            line = window.line(fresh[index])
            for pattern in left if not line.source else ():
                if pattern.expression.search(line.text):
                    counts[pattern] += 1
                    found.matches.append(window.match(fresh[index], pattern))
            at = text.find(anchor, starts[index + 1])
    found.exceptions += window.exceptions()[: max(0, _MOST_TRACEBACKS - len(found.exceptions))]


@cache
def _by_anchor() -> dict[bytes, list[Pattern]]:
    found: dict[bytes, list[Pattern]] = {}
    for pattern in patterns():
        for anchor in pattern.anchors:
            found.setdefault(anchor, []).append(pattern)
    return found


def _windows(file: BinaryIO, found: Scan) -> Iterator[tuple[bytes, int, int]]:
    """Texts with the end of what is new in each, and the number of its first line; what follows it is for context."""
    carry, first_line = b"", 1
    for raw in _blocks(file, found):
        text = carry + raw
        until = len(text) if not raw else text.rfind(b"\n", 0, max(0, len(text) - _AFTER_BYTES)) + 1
        if not until and len(text) > _ENDLESS:  # a line without an end is looked at in pieces
            until = len(text)
        if until:
            yield text, until, first_line
            first_line += text.count(b"\n", 0, until)
            ended = text[until - 1 : until] == b"\n"
            found.lines = first_line - ended
        carry = text[until:]


def _blocks(file: BinaryIO, found: Scan) -> Iterator[bytes]:
    """What is in the file, in UTF-8 or something near it, and at its end nothing.

    Raises:
        NotText: it is not text.
    """
    raw = file.read(_BLOCK)
    wide = next((name for mark, name in _WIDE.items() if raw.startswith(mark)), "") or _wide(raw[:_SAMPLE])
    holes = re.sub(rb"\0{64,}", b"", raw) if b"\0" in raw else b""  # a file server that died leaves runs of them
    if (not wide and holes.count(b"\0") > len(raw) // 1000) or (raw and not holes and b"\0" in raw):
        raise NotText
    decode = codecs.getincrementaldecoder(wide)("replace").decode if wide else None
    while raw:
        found.size += len(raw)
        yield decode(raw).encode() if decode else raw
        raw = file.read(_BLOCK)
    yield b""


def _wide(sample: bytes) -> str:
    """The name of UTF-16 without a mark, as PowerShell appends it: every other byte is 0, and what it says is text."""
    halves = {"utf-16-le": (sample[::2], sample[1::2]), "utf-16-be": (sample[1::2], sample[::2])}
    for name, (low, high) in halves.items():
        if high.count(0) > _WIDE_ZEROS * len(high) and low.count(0) <= _ODD * len(low):
            text = sample[: len(sample) // 2 * 2].decode(name, "replace")
            odd = sum(not (character.isprintable() or character in _IN_TEXT) for character in text)
            if odd <= _ODD * len(text):
                return name
    return ""


class NotText(Exception):
    """A file of bytes that are no log."""


def _like(raw: bytes) -> int:
    """The same for lines that differ by numbers alone."""
    return hash(raw[:_LONGEST].translate(None, b"0123456789abcdefABCDEF."))


class _Window:
    """Lines of the log that are looked at together, and some that follow them.

    What a progress bar writes over is looked at by itself, and so are the lines of a message in a line of JSON: they
    have the number of their line.

    Args:
        opened: hashes of lines of JSON whose like was taken apart before: once is enough, as for all lines.
    """

    def __init__(self, text: bytes, until: int, first_line: int, opened: set[int]) -> None:
        self._lines: list[bytes] = []
        self._numbers: list[int] = []
        self._parts: dict[int, int] = {}
        self._known: dict[int, Line] = {}
        before, after = text[:until].removesuffix(b"\n"), text[until:]
        fresh: set[int] = set()
        self._take(before, first_line, opened, fresh)
        self.count = len(self._lines)
        self._take(after, first_line + before.count(b"\n") + 1, opened, set())
        opened |= fresh if len(opened) < _MOST_SEEN else set()

    def _take(self, text: bytes, number: int, opened: set[int], fresh: set[int]) -> None:
        """Put lines at the end; hashes of those that were taken apart into `fresh`."""
        for whole in text.split(b"\n") if text else ():
            pieces = [whole]
            if b"\r" in whole:
                pieces = whole.removesuffix(b"\r").split(b"\r")
            elif holds_lines(whole) and (like := _like(whole)) not in opened and like not in fresh:
                if within := message_lines(whole):
                    fresh.add(like)
                    self._parts |= {len(self._lines) + place: place + 1 for place in range(len(within))}
                pieces = within or pieces
            self._lines += pieces
            self._numbers += [number] * len(pieces)
            number += 1

    def raw(self, place: int) -> bytes:
        """A line as it stands there, cut where nobody would read on."""
        return self._lines[place][:_LONGEST]

    def line(self, place: int) -> Line:
        """A line."""
        if place not in self._known:
            self._known[place] = line_of(self._numbers[place], self.raw(place), self._parts.get(place, 0))
        return self._known[place]

    def fresh(self, seen: set[int]) -> list[int]:
        """Lines whose like has not been seen; adds them to `seen`, by their hashes."""
        if len(seen) > _MOST_SEEN:
            seen.clear()
        found = []
        for place, raw in enumerate(self._lines[: self.count]):
            like = _like(raw)
            if like not in seen:
                seen.add(like)
                found.append(place)
        return found

    def match(self, place: int, pattern: Pattern) -> Match:
        """A match with what is around it."""
        before = tuple(map(self.line, range(max(0, place - _BEFORE_LINES), place)))
        after = tuple(map(self.line, range(place + 1, min(len(self._lines), place + 1 + _AFTER_LINES))))
        specific = min(map(len, pattern.anchors))
        return Match(pattern.cause, pattern.strength, specific, self.line(place), before, after)

    def exceptions(self) -> list[Match]:
        """The lines that end tracebacks, each of the rank that wrote it; none of what Python itself ignored."""
        found = []
        begins = (place for place, raw in enumerate(self._lines[: self.count]) if b"Traceback (most recent" in raw)
        for place in islice(begins, _MOST_TRACEBACKS):
            head = self.match(place, _TRACEBACK)
            if any(line.text.startswith("Exception ignored in") for line in head.before[-2:]):
                continue
            for number, line in enumerate(head.after):
                if line.prefix in (head.line.prefix, "") and EXCEPTION.match(line.text):
                    rest = self.match(place + 1 + number, _TRACEBACK)
                    found.append(replace(rest, before=head.after[:number]))
                    break
        return found
