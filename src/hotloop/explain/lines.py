"""A line of a log without what launchers, containers and loggers put before it."""

import json
import re
from contextlib import suppress
from dataclasses import dataclass

_ESCAPES = re.compile(
    r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[()][0-9A-B]|[\x00-\x08\x0b-\x1f\x7f]"
)
_PREFIX = re.compile(
    r"""\s*(?:
      \[(?:rank|default|node-|worker-?|w|r|gpu)?\d+\]:?\s?            # torchrun, DeepSpeed
    | \d{1,5}:\s                                                     # srun --label
    | \((?:[\w.:]+\s)?pid=[^)]*\)\s?                                  # Ray
    | \d{4}-\d\d-\d\d[T\s]\d\d:\d\d:\d\d[.,\d]*(?:Z|[+-]\d\d:?\d\d)?\s*  # kubectl, loggers
    | [A-Z][a-z]{2}\s[\s\d]\d\s\d\d:\d\d:\d\d\s\S+\s[^\s:\[]+(?:\[\d+\])?:\s  # syslog, journal
    | [\w.-]{1,80}\s+\|\s                                             # docker compose
    | \[\d+,\d+\]<std(?:out|err)>:?\s?                                # mpirun
    | \[\s*\d+\.\d+\]\s                                               # dmesg
    | \[[^\]\s]*\d\d:\d\d[^\]]*\]\s                                   # [07:12:01]
    | \[\w[\w-]*-\d+\]\s                                              # [node-1]
    )""",
    re.VERBOSE,
)
_MOST_PREFIXES = 4
_LONGEST = 16_000
_LEVEL = re.compile(r"\bWARN(?:ING)?\b|\b\w*Warning\b|^W\d{4}|\[W[ \d]|\bINFO\b|\bDEBUG\b")
_HANDLED = re.compile(
    r"\bretry(?:ing)?\b|(?<![Mm]ax )retries|attempt \d|will try|[Ff]all(?:ing|s)? ?back|ignor(?:ed|ing)|skipp(?:ed|ing)"
    r"|\(handled\)|not critical|harmless|non-?fatal|[Cc]ontinuing|keeping "
)
_TOLD_IN_WARNINGS = re.compile(r"CUDA initialization|is not compatible with the current PyTorch")
"""By torch, when it cannot use the GPU."""
_SOURCE = re.compile(
    r"raise |File \"|return |warnings\.warn\(|assert |if |elif |except |│|logger\.|logging\.|log\.|print\("
    r"|\w+ = [rf]?[\"']"
)
_PROGRESS = re.compile(
    r"\bepoch\b\D{0,12}\d|\b(?:global_?)?steps?\b\D{0,6}\d|\biter(?:ation)?s?\b\D{0,6}\d|it/s|s/it|/step\b|\d+%\||"
    r"\b(?:train_|val_)?loss\b\W{0,4}\d",
    re.IGNORECASE,
)

_MESSAGES = ("log", "message", "msg")
_TRACEBACKS = ("exc_info", "exception", "stack_trace", "traceback")
"""Where loggers that write JSON put them: docker; python-json-logger, structlog, the clouds' agents."""


@dataclass(frozen=True)
class Line:
    """One line.

    Attributes:
        number: in the file, from 1; what carriage returns part has the number of its line.
        prefix: what was taken off: tells ranks apart.
        text: the rest.
        part: of the lines that a line of JSON holds in its message, from 1; 0: it is no such one.
    """

    number: int
    prefix: str
    text: str
    part: int = 0

    @property
    def place(self) -> tuple[int, int]:
        """Where it stands: sorts lines as they are read."""
        return self.number, self.part

    @property
    def handled(self) -> bool:
        """Whether it says that something was dealt with."""
        return bool(_HANDLED.search(self.text))

    @property
    def warns(self) -> bool:
        """Whether it says that it is no failure."""
        level = bool(_LEVEL.search(self.prefix + self.text)) and not _TOLD_IN_WARNINGS.search(self.text)
        return level or self.handled

    @property
    def source(self) -> bool:
        """Whether it is a line of the program that a traceback shows."""
        return bool(_SOURCE.match(self.text))

    @property
    def progress(self) -> bool:
        """Whether it tells of training that goes on."""
        return bool(_PROGRESS.search(self.text))


def line_of(number: int, raw: bytes, part: int = 0) -> Line:
    """A line as it stands in the file, or in a message of several lines."""
    text = raw[:_LONGEST].decode("utf-8", "replace").removeprefix("\ufeff").rstrip()
    text = _ESCAPES.sub("", _message(text) if text.startswith("{") else text)
    prefix = ""
    for _ in range(_MOST_PREFIXES):
        found = _PREFIX.match(text)
        if not found or found.end() == len(text):
            break
        prefix += found[0]
        text = text[found.end() :]
    return Line(number, prefix, text.strip(), part)


def holds_lines(raw: bytes) -> bool:
    """Whether a line may be JSON with several lines in it. Docker ends each message with the end of a line."""
    return raw.startswith(b"{") and raw.count(b"\\n") > raw.count(b'\\n"')


def message_lines(raw: bytes) -> list[bytes]:
    """The lines that a line of JSON holds in its message and its traceback; [] if they are not several."""
    try:
        said = json.loads(raw)
    except (ValueError, RecursionError):
        return []
    if not isinstance(said, dict):
        return []
    texts = [next((said[key] for key in _MESSAGES if isinstance(said.get(key), str)), "")]
    texts += [said[key] for key in _TRACEBACKS if isinstance(said.get(key), str)]
    found = [line for text in texts for line in text.rstrip().split("\n") if text]
    return [line.encode("utf-8", "replace") for line in found] if len(found) > 1 else []


def _message(text: str) -> str:
    """What a line of JSON says, as docker and the clouds' loggers write them."""
    with suppress(ValueError):
        said = json.loads(text)
        found = next((said[key] for key in _MESSAGES if isinstance(said.get(key), str)), None)
        return found.rstrip() if found else text
    return text
