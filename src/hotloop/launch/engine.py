"""What every engine can do, and the engines."""

import importlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hotloop.launch.record import Launch
from hotloop.launch.request import Request
from hotloop.launch.status import Status

_LOOK_SECONDS = 0.3


@dataclass(frozen=True)
class Document:
    """What an engine is sent: a script, a manifest.

    Attributes:
        name: of a file that could hold it.
    """

    name: str
    text: str


class Engine(Protocol):
    """Where jobs run. Each starts one again after an interruption for as long as it saves something.

    Attributes:
        look_seconds: between two questions how something stands.
    """

    look_seconds: float

    def gpus(self) -> int:
        """How many a machine of it has, where nobody has said how many are wanted.

        Raises:
            InputError: it cannot know.
        """

    def check(self, request: Request) -> None:
        """Ask the engine what can be known before anything is written or sent.

        Raises:
            InputError: this engine is not here, or cannot do it.
        """

    def documents(self, request: Request) -> list[Document]:
        """What would be sent; asks nobody.

        Raises:
            InputError: what is asked for cannot be put into words of the engine.
        """

    def submit(self, request: Request) -> str:
        """Hand it over; what the engine calls it.

        Raises:
            InputError: the engine refuses it.
        """

    def status(self, launch: Launch) -> Status:
        """How it stands."""

    def log(self, launch: Launch, follow: bool) -> Iterator[str]:
        """What it has written, in pieces; with `follow` until it has ended, with empty ones while nothing comes."""

    def cancel(self, launch: Launch) -> None:
        """Have it save and stop, and not start again. Returns before that is done."""


ENGINES = {
    "local": "hotloop.launch.local:Local",
    "slurm": "hotloop.launch.slurm:Slurm",
    "ray": "hotloop.launch.ray:Ray",
}
"""Name -> where it is; imported when it is asked for."""


def engine_of(name: str) -> Engine:
    """The engine of that name."""
    module, _, kind = ENGINES[name].partition(":")
    engine: Engine = getattr(importlib.import_module(module), kind)()
    return engine


def read_log(file: Path, follow: bool, ended: Callable[[], bool], look_seconds: float) -> Iterator[str]:
    """What a file holds; with `follow` what is added to it, too, until `ended` is so, which is asked now and then."""
    position, last, asked = 0, not follow, time.monotonic()
    while True:
        if file.exists():
            with file.open(errors="replace") as opened:
                opened.seek(position)
                while text := opened.read(1 << 16):
                    yield text
                position = opened.tell()
        if last:
            return
        if time.monotonic() - asked >= look_seconds:
            last, asked = ended(), time.monotonic()
        if not last:
            yield ""
            time.sleep(min(_LOOK_SECONDS, look_seconds))
