"""A training that is under way in a process of its own, and tells how fast it is."""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import fsum, sqrt
from pathlib import Path
from statistics import median

from hotloop.tune.children import OUTPUT, Child, signals_held

_LOOK_SECONDS = 0.05
_END_SECONDS = 5.0
_TOLD_BYTES = 4000
_FAR, _FEW = 2.0, 0.2


@dataclass(frozen=True)
class Chunk:
    """Some steps in a row.

    Attributes:
        seconds: a sample, or a step where samples are not known.
        samples: how many it tells of; all chunks count alike where they are not known.
        losses: numbers of steps, and their mean loss; none where it is not known.
        useless: settings that change nothing here.
        trouble: why these settings will not do, although they run; empty if they do.
    """

    seconds: float
    samples: int = 1
    losses: tuple[tuple[int, float], ...] = ()
    useless: tuple[str, ...] = ()
    trouble: str = ""


def mean_of(chunks: Sequence[Chunk]) -> tuple[float, float]:
    """Seconds of a sample, or step, with their standard error (of a ratio of sums).

    Of each sample, not of each chunk: at the end of an epoch steps in flight are waited for, so that chunks alternate
    where epochs are short (47 and 25 ms of a step, of 10 and 30 steps, where all took 30 ms: ResNet-50 on an H200).
    Chunks that are far longer than most are left out, if there are few: a shape that was compiled, for example, which a
    whole training does once.
    """
    far = _FAR * median(chunk.seconds for chunk in chunks)
    usual = [chunk for chunk in chunks if chunk.seconds <= far]
    kept = usual if len(usual) >= (1 - _FEW) * len(chunks) else chunks
    samples, count = sum(chunk.samples for chunk in kept), len(kept)
    mean = fsum(chunk.seconds * chunk.samples for chunk in kept) / samples
    if count == 1:
        return mean, mean
    squares = fsum((chunk.samples * (chunk.seconds - mean)) ** 2 for chunk in kept)
    return mean, sqrt(squares * count / (count - 1)) / samples


class Failed(Exception):
    """The process has ended, or told nothing for too long."""


class Running:
    """One process; a context manager that ends it, and all that it has started.

    Args:
        child: in a session of its own, as soon as it runs our code; what it prints goes to OUTPUT in the folder.
        folder: of its own; removed at the end. Into `told-*.jsonl` in it the process appends a JSON object a line;
            `attached-PID` in it are processes that were entered; `stop` asks them for the end.
    """

    def __init__(self, child: Child, folder: Path) -> None:
        self._child = child
        self._folder = folder

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *_: object) -> None:
        """First asked to end, then ended; those too that a launcher, torchrun say, has put into groups of their own."""
        try:
            (self._folder / "stop").touch()
            with suppress(subprocess.TimeoutExpired):
                self._child.wait(_END_SECONDS)
        finally:
            with signals_held():
                if self._child.poll() is None:
                    with suppress(ProcessLookupError):  # a fork is waited for by another process than this one
                        os.kill(self._child.pid, signal.SIGKILL)  # it may have no group of its own yet
                for group in (self._child.pid, *self._entered()):
                    with suppress(ProcessLookupError, PermissionError):
                        os.killpg(group, signal.SIGKILL)
                self._child.wait()
                shutil.rmtree(self._folder, ignore_errors=True)

    def _entered(self) -> list[int]:
        """Groups of processes that were entered and are still those that were."""
        found = []
        for file in self._folder.glob("attached-*"):
            process = int(file.name.removeprefix("attached-"))
            with suppress(OSError):
                if str(self._folder).encode() in Path(f"/proc/{process}/environ").read_bytes():
                    found.append(os.getpgid(process))
        return found

    def chunks(self, deadline: float) -> Iterator[Chunk]:
        """What it tells, until it ends by itself.

        Args:
            deadline: by the monotonic clock.

        Raises:
            Failed: it has ended with an error, or the deadline has come.
        """
        read: dict[Path, int] = {}
        while True:
            code = self._child.poll()
            for file in self._folder.glob("told-*.jsonl"):
                lines = file.read_text().splitlines(keepends=True)
                for line in lines[read.get(file, 0) :]:
                    if line.endswith("\n"):
                        read[file] = read.get(file, 0) + 1
                        yield Chunk(**json.loads(line))
            if code is not None:
                if code:
                    raise Failed(self._last_words(code))
                return
            if time.monotonic() > deadline:
                raise Failed("it told nothing in time")
            time.sleep(_LOOK_SECONDS)

    def _last_words(self, code: int) -> str:
        """The line that says why it has ended."""
        content = (self._folder / OUTPUT).read_bytes()[-_TOLD_BYTES:].decode(errors="replace")
        lines = [line.strip() for line in content.splitlines() if line.strip()]
        lines = [line for line in lines if not line.startswith(("cause: ", "fix: "))] or lines
        named = [line for line in lines if "Error" in line.split(":")[0] or line.startswith("error:")]
        return (named or lines or [f"code {code}"])[-1]
