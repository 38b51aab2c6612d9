"""Signs of life of a rank, for the process that has started it."""

import faulthandler
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from hotloop.core.live import Publisher
from hotloop.train.collectives import last_collective
from hotloop.train.progress import Span
from hotloop.train.world import World

_SECONDS = 0.5
_BEAT_BYTES = 256
PATIENCE_SECONDS = 3600.0
"""For what a disk or a store does."""
ENDED = "ended"


@dataclass(frozen=True)
class Heartbeat:
    """What a rank is at.

    Attributes:
        beats: grows with each step, each batch of a validation, each save: of ranks that wait for each other alike.
        signs: grows with each phase, a batch's too, and while a disk or a store is waited for: on each rank by itself.
        phase: starting, loading, step, validating, saving, ending or ended.
    """

    rank: int
    pid: int
    beats: int
    signs: int
    step: int
    phase: str


class Heart:
    """Writes a rank's heartbeat twice a second; a context manager. Without a folder in the world it does nothing.

    On SIGUSR2 the stacks of all threads go to a file, whatever Python is doing. Once there is a file `asked`, the last
    collective goes to another one.

    What the loop tells is published, too, once there is a publisher.

    Attributes:
        world: whose rank it is of.
        phase: what it is at.
        step: set by the loop.
    """

    def __init__(self, world: World) -> None:
        self.phase = "starting"
        self.step = 0
        self._beats = self._signs = 0
        self._waits: list[float] = []
        self.world = world
        self._publisher: Publisher | None = None
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def signs_of_life(self) -> tuple[object, ...]:
        """Another one after any progress."""
        return self._beats, self._signs, self.step, self.phase

    @property
    def is_patient(self) -> bool:
        """Whether a disk or a store is waited for, and not for too long yet."""
        return any(time.monotonic() < until for until in tuple(self._waits))

    def beat(self) -> None:
        """Something has been done."""
        self._beats += 1
        if self._publisher:
            self._publisher.beat(self.step, self.phase)

    def enter(self, phase: str) -> None:
        """A phase has begun."""
        self.phase = phase
        self._signs += 1  # a step of many batches may take longer than ranks may be without progress
        if self._publisher:
            self._publisher.enter(phase)

    @property
    def due(self) -> bool:
        """Whether the next beat tells what was measured."""
        return self._publisher is not None and self._publisher.due

    @contextmanager
    def working(self) -> Iterator[None]:
        """What a disk or a store does in this block may take long without a step: that is no hang, up to a limit."""
        until = time.monotonic() + PATIENCE_SECONDS
        self._waits.append(until)
        try:
            yield
        finally:
            self._waits.remove(until)
            self._signs += 1  # no beat: one rank may do more of it than another, and would be taken to be ahead
            if self._publisher:
                self._publisher.beat(self.step, self.phase)

    def publish(self, publisher: Publisher) -> None:
        """From now on there."""
        self._publisher = publisher

    def measured(self, span: Span, steps: int, communication_seconds: float | None) -> None:
        """So many steps took this; all so far have waited for so long for other ranks."""
        if self._publisher:
            self._publisher.set(communication_seconds=communication_seconds)
            self._publisher.stepped(span.seconds, span.wait_seconds, span.samples, steps)

    def planned(self, save_seconds: float) -> None:
        """The next checkpoint is due in so long; 0: not by the clock."""
        if self._publisher:
            self._publisher.set(save_every_seconds=save_seconds)

    def __enter__(self) -> "Heart":
        if self.world.folder:
            self._stacks = stacks_file(Path(self.world.folder), self.world.rank).open("w")
            faulthandler.register(signal.SIGUSR2, file=self._stacks, all_threads=True)
            # Raises where there is no room; from then on there is.
            heartbeat_file(Path(self.world.folder), self.world.rank).write_text(" " * _BEAT_BYTES)
            self._write()
            self._thread = threading.Thread(target=self._run, name="hotloop-heartbeat", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread:
            self._end.set()
            self._thread.join()
            self.phase = ENDED
            self._write()
            faulthandler.unregister(signal.SIGUSR2)
            self._stacks.close()

    def _run(self) -> None:
        folder = Path(self.world.folder)
        while not self._end.wait(_SECONDS):
            if self.is_patient:
                self._signs += 1
            self._write()
            with suppress(OSError):
                if asked_file(folder).exists() and not collective_file(folder, self.world.rank).exists():
                    self._write_collective(folder)

    def _write_collective(self, folder: Path) -> None:
        last = ""
        with suppress(Exception):  # torch's recorder is not public; without it the report has the stacks
            last = last_collective()
        unfinished = collective_file(folder, self.world.rank).with_suffix(".part")
        unfinished.write_text(last)
        unfinished.replace(collective_file(folder, self.world.rank))

    def _write(self) -> None:
        file = heartbeat_file(Path(self.world.folder), self.world.rank)
        unfinished = file.with_suffix(".part")
        beat = Heartbeat(self.world.rank, os.getpid(), self._beats, self._signs, self.step, self.phase)
        text = json.dumps(asdict(beat)).ljust(_BEAT_BYTES)
        try:
            unfinished.write_text(text)
            unfinished.replace(file)
        except OSError:  # a disk that is full does not make a rank hang: the room that the file has suffices
            with suppress(OSError), file.open("r+") as opened:
                opened.write(text)


def heartbeat_file(folder: Path, rank: int) -> Path:
    """Where a rank's heartbeat is."""
    return folder / f"heartbeat-{rank}.json"


def heartbeat_files(folder: Path) -> list[Path]:
    """Of all ranks of this machine that have written one."""
    return sorted(folder.glob("heartbeat-*.json"))


def asked_file(folder: Path) -> Path:
    """There once ranks are asked for what they sent last."""
    return folder / "asked"


def collective_file(folder: Path, rank: int) -> Path:
    """Where a rank writes that."""
    return folder / f"collective-{rank}.txt"


def stacks_file(folder: Path, rank: int) -> Path:
    """Where a rank writes its stacks when asked to."""
    return folder / f"stacks-{rank}.txt"
