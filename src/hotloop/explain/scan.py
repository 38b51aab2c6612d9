"""A log of any length, read once in blocks: the lines that tell of causes, with what follows them, and its end."""

import codecs
import re
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

from hotloop.explain.causes import Pattern, Strength, patterns
from hotloop.explain.lines import Line, line_of

_BLOCK = 4 << 20
_AFTER_BYTES = 24 << 10
"""Of each match that are looked at, to see whether the run went on."""
_AFTER_LINES = 80
_BEFORE_LINES = 30
_TAIL_BYTES = 96 << 10
_MOST_MATCHES = 40
"""Of a pattern; what comes later is not the first cause."""
_MOST_TRIES = 20_000
_TRACEBACK = Pattern("unknown", "vague", re.compile(""), (b"",))
_WIDE = {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
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
    """Read a log: about 100 MB/s, in memory of a few blocks."""
    found, counts, tries = Scan(), Counter[int](), Counter[bytes]()
    by_anchor: dict[bytes, list[tuple[int, Pattern]]] = {}
    for number, pattern in enumerate(patterns()):
        for anchor in pattern.anchors:
            by_anchor.setdefault(anchor, []).append((number, pattern))
    tail: deque[bytes] = deque()
    for text, until, first_line in _windows(file, found):
        block = _Block(text, until, first_line)
        for anchor, those in by_anchor.items():
            for place in block.places(anchor, tries):
                line = block.line(place)
                for number, pattern in those:
                    if counts[number] < _MOST_MATCHES and not line.source and pattern.expression.search(line.text):
                        counts[number] += 1
                        found.matches.append(block.match(place, line, pattern))
        for place in block.places(b"Traceback (most recent call last)", tries):
            found.exceptions += block.exception(place)
        tail.append(text[:until])
        while len(tail) > 1 and sum(map(len, tail)) - len(tail[0]) > _TAIL_BYTES:
            tail.popleft()
    end = b"".join(tail)[-_TAIL_BYTES:].split(b"\n")
    found.tail = [line_of(found.lines - len(end) + place + 1, raw) for place, raw in enumerate(end) if raw.strip()]
    found.matches.sort(key=lambda match: match.line.number)
    return found


def _windows(file: BinaryIO, found: Scan) -> Iterator[tuple[bytes, int, int]]:
    """Texts with the end of what is new in each, and the number of its first line; what follows it is for context."""
    carry, first_line = b"", 1
    for raw in _blocks(file, found):
        text = carry + raw.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        until = len(text) if not raw else text.rfind(b"\n", 0, max(0, len(text) - _AFTER_BYTES)) + 1
        if until:
            yield text, until, first_line
            first_line += text.count(b"\n", 0, until)
        carry = text[until:]
    found.lines = first_line


def _blocks(file: BinaryIO, found: Scan) -> Iterator[bytes]:
    """What is in the file, in UTF-8 or something near it, and at its end nothing.

    Raises:
        NotText: it is not text.
    """
    raw = file.read(_BLOCK)
    wide = next((name for mark, name in _WIDE.items() if raw.startswith(mark)), "")
    if b"\0" in raw[:_BLOCK] and not wide and raw.count(b"\0") > len(raw) // 1000:
        raise NotText
    decode = codecs.getincrementaldecoder(wide)("replace").decode if wide else None
    while raw:
        found.size += len(raw)
        yield decode(raw).encode() if decode else raw
        raw = file.read(_BLOCK)
    yield b""


class NotText(Exception):
    """A file of bytes that are no log."""


class _Block:
    """A window of the log, by places of bytes."""

    def __init__(self, text: bytes, until: int, first_line: int) -> None:
        self._text = text
        self._until = until
        self._first_line = first_line
        self._counted = 0, first_line

    def places(self, anchor: bytes, tries: Counter[bytes]) -> Iterator[int]:
        """Beginnings of the lines that hold a text."""
        place = self._text.find(anchor, 0, self._until)
        while place >= 0 and tries[anchor] < _MOST_TRIES:
            tries[anchor] += 1
            yield self._text.rfind(b"\n", 0, place) + 1
            end = self._text.find(b"\n", place, self._until)
            place = self._text.find(anchor, end, self._until) if end >= 0 else -1

    def line(self, start: int) -> Line:
        """The line that begins there."""
        place, number = self._counted if self._counted[0] <= start else (0, self._first_line)
        number += self._text.count(b"\n", place, start)
        self._counted = start, number
        end = self._text.find(b"\n", start)
        return line_of(number, self._text[start : end if end >= 0 else len(self._text)])

    def match(self, start: int, line: Line, pattern: Pattern) -> Match:
        """A match with what is around it."""
        before = self._text[max(0, start - _AFTER_BYTES) : start].split(b"\n")[-_BEFORE_LINES - 1 : -1]
        end = self._text.find(b"\n", start)
        after = self._text[end + 1 : end + 1 + _AFTER_BYTES].split(b"\n")[:_AFTER_LINES] if end >= 0 else []
        return Match(
            pattern.cause, pattern.strength, min(map(len, pattern.anchors)), line,
            tuple(line_of(line.number - len(before) + place, raw) for place, raw in enumerate(before)),
            tuple(line_of(line.number + 1 + place, raw) for place, raw in enumerate(after)),
        )  # fmt: skip

    def exception(self, start: int) -> list[Match]:
        """The line that ends a traceback, of the same rank."""
        head = self.match(start, self.line(start), _TRACEBACK)
        for place, line in enumerate(head.after):
            own = line.prefix == head.line.prefix or not line.prefix
            if own and EXCEPTION.match(line.text):
                return [Match("unknown", "vague", 0, line, head.after[:place], head.after[place + 1 :])]
        return []
