"""A training that is under way in a process of its own, and tells how fast it is."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

_LOOK_SECONDS = 0.05
_END_SECONDS = 5.0
_TOLD_BYTES = 4000


@dataclass(frozen=True)
class Chunk:
    """Some steps in a row.

    Attributes:
        seconds: a sample, or a step where samples are not known.
        steps: that they are, where losses are known.
        loss: mean; None if it is not known.
        useless: settings that change nothing here.
        trouble: why these settings will not do, although they run; empty if they do.
    """

    seconds: float
    steps: int = 0
    loss: float | None = None
    useless: tuple[str, ...] = ()
    trouble: str = ""


class Failed(Exception):
    """The process has ended, or told nothing for too long."""


class Running:
    """One process; a context manager that ends it, and all that it has started.

    Args:
        told: a file to which it appends a JSON object a line; made by it.
        folder: of its own; removed at the end. `stop` in it asks for the end.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], folder: "TemporaryDirectory[str]",
        content: bytes = b"",
    ) -> None:  # fmt: skip
        self._folder = folder
        self._output: IO[bytes] = (Path(folder.name) / "output").open("w+b")
        self._process = subprocess.Popen(  # noqa: S603 - the user's own command, or ours
            command, env={**environment}, stdin=subprocess.PIPE, stdout=self._output, stderr=self._output,
            start_new_session=True,
        )  # fmt: skip
        assert self._process.stdin
        with suppress(BrokenPipeError):
            self._process.stdin.write(content)
            self._process.stdin.close()

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *_: object) -> None:
        """First asked to end, as what it has started may be in another group; then ended."""
        (Path(self._folder.name) / "stop").touch()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._output.close()
        self._folder.cleanup()

    def chunks(self, deadline: float) -> Iterator[Chunk]:
        """What it tells, until it ends by itself.

        Args:
            deadline: by the monotonic clock.

        Raises:
            Failed: it has ended with an error, or the deadline has come.
        """
        read: dict[Path, int] = {}
        while True:
            ended = self._process.poll() is not None
            for file in Path(self._folder.name).glob("told-*.jsonl"):
                lines = file.read_text().splitlines(keepends=True)
                for line in lines[read.get(file, 0) :]:
                    if line.endswith("\n"):
                        read[file] = read.get(file, 0) + 1
                        yield Chunk(**json.loads(line))
            if ended:
                if self._process.returncode:
                    raise Failed(self._last_words())
                return
            if time.monotonic() > deadline:
                raise Failed("it told nothing in time")
            time.sleep(_LOOK_SECONDS)

    def _last_words(self) -> str:
        """The line that says why it has ended."""
        self._output.flush()
        content = (Path(self._folder.name) / "output").read_bytes()[-_TOLD_BYTES:].decode(errors="replace")
        lines = [line.strip() for line in content.splitlines() if line.strip()]
        named = [line for line in lines if "Error" in line.split(":")[0] or line.startswith("error:")]
        return (named or lines or [f"code {self._process.returncode}"])[-1]
