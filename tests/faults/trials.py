"""The job under test, and the processes that train it."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotloop.core.live import FOLDER, read_live

REPOSITORY = Path(__file__).parents[2]
LIMIT_SECONDS = 240.0
"""A start that takes longer than this hangs."""
_LOOK_SECONDS = 0.02
_MARK = "HOTLOOP_TRIAL"

_ROLES = {
    b"resource_tracker": "a tracker of shared memory",
    b"spawn_main": "a data worker",
    b"checkpoint.writer": "a writer of checkpoints",
}

STEPS = 8 * 23
"""Of a run."""
SETTINGS = {
    "one": ("data.workers=1",),
    "ddp": ("ranks.processes=2", "parallel=ddp", "data.workers=1"),
    "fsdp": ("ranks.processes=2", "parallel=fsdp", "data.workers=1"),
    "ddp of 3": ("ranks.processes=3", "parallel=ddp", "data.workers=1"),
    "fsdp of 4": ("ranks.processes=4", "parallel=fsdp", "data.workers=1"),
    "compiled": ("data.workers=1", "speed.compile=true"),
}
"""How it is trained: by one process, by some with a copy of the weights each, by some that divide them, by one whose
first step is compiled."""


@dataclass(frozen=True)
class Trial:
    """The demo's job (its 1,442 images, a network of two layers, so that a run takes seconds) in a folder.

    Attributes:
        setting: one of `SETTINGS`.
        every: steps between checkpoints.
        number: of those of its kind and setting, from 0: what takes turns goes by it.
        variables: of its environment, besides.
        source: the folder of the package that trains.
    """

    images: Path
    run: Path
    setting: str = "one"
    every: int = 5
    number: int = 0
    variables: dict[str, str] = field(default_factory=dict)
    source: Path = REPOSITORY / "src"

    def command(self, *more: str) -> list[str]:
        settings = (
            "device=cpu",
            "task.image_size=16",
            "model.name=tiny:broad",
            "train.epochs=8",
            "optimizer.learning_rate=0.01",
            "log.tensorboard=false",
            "log.report=false",
            *SETTINGS[self.setting],
            f"data.train={self.images}/train",
            f"data.val={self.images}/val",
            f"checkpoint.every={self.every} steps",
            "checkpoint.background=true",
            "log.every=1",
            f"run.dir={self.run}",
            *more,
        )
        options = [part for setting in settings for part in ("--set", setting)]
        job = str(REPOSITORY / "examples/digits/job.toml")
        return [sys.executable, "-m", "hotloop", "train", job, *options, "--json"]

    @property
    def newest_step(self) -> int:
        """Of the checkpoints that are there."""
        return max((int(path.name.rsplit("-", 1)[-1]) for path in self.checkpoints), default=0)

    @property
    def checkpoints(self) -> list[Path]:
        """Oldest first."""
        return sorted((self.run / "checkpoints").glob("epoch-*"))

    @property
    def result(self) -> dict[str, Any]:
        """That it has left."""
        found: dict[str, Any] = json.loads((self.run / "result.json").read_text())
        return found

    @property
    def logged_step(self) -> int:
        """The last one: each is logged."""
        return max((int(record["step"]) for record in self.records("step")), default=0)

    @property
    def live(self) -> Path:
        """Where its processes say what they are at."""
        return self.run.with_suffix(".live")

    def records(self, event: str) -> list[dict[str, Any]]:
        """Lines of the run's metrics."""
        file = self.run / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        records = [json.loads(line) for line in lines if line.endswith("}")]
        return [record for record in records if record["event"] == event]


@dataclass
class Started:
    """A start of a trial.

    Attributes:
        hung: it took longer than the limit, or left processes behind for so long.
    """

    process: subprocess.Popen[str]
    mark: str
    live: Path
    out: str = ""
    err: str = ""
    hung: bool = False

    @property
    def code(self) -> int | None:
        return self.process.returncode

    def processes(self) -> list[int]:
        """All that it has started and that are there, itself included."""
        return [pid for pid in _all() if _environment(pid).get(_MARK) == self.mark]

    def phases(self) -> set[str]:
        """What its ranks are at."""
        return {process.phase for process in read_live(self.live).processes}

    def workers(self) -> list[int]:
        """Those that load data."""
        return [pid for pid in self.processes() if b"spawn_main" in _read(pid, "cmdline")]

    def rank(self, number: int) -> int | None:
        """The process that is this rank, while it is there."""
        return next((pid for pid in self.processes() if self.role(pid) == f"rank {number}"), None)

    def role(self, pid: int) -> str:
        """What one of its processes is there for."""
        if pid == self.process.pid:
            return "the training itself"
        command = _read(pid, "cmdline")
        for part, role in _ROLES.items():
            if part in command:
                return role
        return f"rank {_environment(pid).get('RANK', '?')}"

    def wait_until(self, happened: Callable[[], bool]) -> bool:
        """Whether it did so, before the process ended or the limit."""
        limit = time.monotonic() + LIMIT_SECONDS
        while self.process.poll() is None and time.monotonic() < limit:
            if happened():
                return True
            time.sleep(_LOOK_SECONDS)
        return False

    def end(self) -> None:
        """Wait for it and all that it has started."""
        limit = time.monotonic() + LIMIT_SECONDS
        try:
            self.out, self.err = self.process.communicate(timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            self.hung = True
        while self.processes() and time.monotonic() < limit:
            time.sleep(_LOOK_SECONDS)
        self.hung |= bool(self.processes())
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.process.poll() is None:
            self.out, self.err = self.process.communicate()


@contextmanager
def started(trial: Trial, *more: str) -> Iterator[Started]:
    """Start a trial's training; at the end it is waited for."""
    mark = uuid.uuid4().hex
    path = f"{trial.source}{os.pathsep}{REPOSITORY / 'tests' / 'support'}"
    path += f"{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    trial.live.mkdir(mode=0o700, exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": path, _MARK: mark, FOLDER: str(trial.live), **trial.variables}
    errors = trial.run.with_suffix(".err")  # of a killed process others may hold the pipe
    with errors.open("w+") as err:
        process = subprocess.Popen(
            trial.command(*more), stdout=subprocess.PIPE, stderr=err, env=environment, text=True, start_new_session=True
        )
        begun = Started(process, mark, trial.live)
        try:
            yield begun
        finally:
            begun.end()
            begun.err = errors.read_text()


def _all() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def _read(pid: int, name: str) -> bytes:
    try:
        return Path("/proc", str(pid), name).read_bytes()
    except OSError:
        return b""


def _environment(pid: int) -> dict[str, str]:
    pairs = (pair.partition(b"=") for pair in _read(pid, "environ").split(b"\0"))
    return {name.decode(errors="replace"): value.decode(errors="replace") for name, _, value in pairs}
