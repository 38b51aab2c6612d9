"""What every engine can do, and the engines."""

import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hotloop.core.errors import HotloopError
from hotloop.launch.finding import LaunchFinding
from hotloop.launch.record import Launch
from hotloop.launch.request import Request
from hotloop.launch.status import Status

_LOOK_SECONDS = 0.3


@dataclass(frozen=True)
class Document:
    """What an engine is sent: a script, a manifest.

    Attributes:
        name: of a file that could hold it.
        findings: what one should know before it is sent.
    """

    name: str
    text: str
    findings: tuple[LaunchFinding, ...] = ()


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

    def documents(self, requests: Sequence[Request]) -> list[Document]:
        """What would be sent; asks nobody.

        Args:
            requests: several of a sweep differ in what the job says alone, and in names.

        Raises:
            InputError: what is asked for cannot be put into words of the engine.
        """

    def submit(self, requests: Sequence[Request]) -> list[str]:
        """Hand them over; what the engine calls each.

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
    "kubernetes": "hotloop.launch.kubernetes.engine:Kubernetes",
    "ray": "hotloop.launch.ray:Ray",
}
"""Name -> where it is; imported when it is asked for."""


def engine_of(name: str) -> Engine:
    """The engine of that name.

    Raises:
        HotloopError: there is none: a record of another version may name one.
    """
    if name not in ENGINES:
        raise HotloopError(f"no engine {name}", f"there are {', '.join(ENGINES)}", "pip install --upgrade hotloop")
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
            with suppress(HotloopError):  # it does not answer now; the log goes on
                last = ended()
            asked = time.monotonic()
        if not last:
            yield ""
            time.sleep(min(_LOOK_SECONDS, look_seconds))
