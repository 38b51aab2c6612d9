"""How a launch's last start has ended, by what it has left in files."""

import re
from typing import get_args

from hotloop.core.files import write_atomic
from hotloop.launch.record import Launch
from hotloop.launch.status import State, Status

_TAIL_BYTES = 1 << 16
_ERROR = re.compile(r"^error: (.*)$", re.MULTILINE)


def read_end(launch: Launch) -> Status | None:
    """What the script has written at its end; None while it has not, or what it wrote is not ours."""
    try:
        word, _, reason = launch.end_file.read_text().strip().partition(" ")
    except OSError:
        return None
    for state in get_args(State):
        if state == word:
            return Status(state, (first_error(launch) or reason) if state == "failed" else reason)
    return None


def write_end(launch: Launch, status: Status) -> None:
    """Keep an end that only the engine has told: it forgets."""
    write_atomic(launch.end_file, f"{status.state} {status.reason}\n")


def first_error(launch: Launch) -> str:
    """The first line of the first error of the last start, by the log's end: others follow from it; empty if none."""
    try:
        with launch.log_file.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return error_in(text.rpartition("\nhotloop: start ")[2])


def error_in(text: str) -> str:
    """The first line of the first error in a text; empty if there is none."""
    found: list[str] = _ERROR.findall(text)
    return found[0] if found else ""
