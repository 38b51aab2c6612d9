"""Programs of engines, run to their end."""

import subprocess
from collections.abc import Sequence
from typing import Protocol

from hotloop.core.errors import HotloopError

_SECONDS = 60.0


class NoAnswer(HotloopError):
    """A program has not ended in time: what it was asked for may have been done."""


class Run(Protocol):
    """Runs a program: its exit code, standard output and standard error; FileNotFoundError if there is none."""

    def __call__(self, command: Sequence[str], /, text: str = "") -> "subprocess.CompletedProcess[str]": ...


def run(command: Sequence[str], /, text: str = "") -> "subprocess.CompletedProcess[str]":
    """Run a program with `text` for input.

    Raises:
        FileNotFoundError: there is no such program.
        NoAnswer: it does not end within a minute.
    """
    try:
        return subprocess.run(list(command), input=text, capture_output=True, text=True, timeout=_SECONDS)  # noqa: S603
    except subprocess.TimeoutExpired:
        raise NoAnswer(
            f"{command[0]} does not answer within {_SECONDS:.0f} s",
            "its daemon may be down",
            f"try {command[0]} by hand",
        ) from None
