"""A run: one directory that holds everything about one training.

```
runs/digits-20261121-093000/
  job.toml        the job as resolved
  machine.json    the machine as plain data
  starts.jsonl    one line a start, and how the one before it ended
  origin.json     the checkpoint that was named to go on from, if one was
  metrics.jsonl   one line a logged step, epoch, validation and save
  events/         TensorBoard
  checkpoints/    step-00000120/ and so on
  result.json     what came out, or how it ended
  examples.json   predictions on validation samples
  report.html     all of it on one page
```
"""

import errno
import json
import math
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from hotloop.core.errors import InputError, cannot_write
from hotloop.core.files import lock_at_once, write_atomic
from hotloop.core.history import History, note_start, read_history
from hotloop.core.job import Job
from hotloop.core.machine import Machine

Status = Literal["finished", "preempted", "failed", "running", "interrupted"]

_LOOK_SECONDS = 0.5

LAUNCHED = "HOTLOOP_LAUNCHED"
"""Environment variable by which what has launched a run says so."""


@dataclass(frozen=True)
class Result:
    """What came out of a run, as `result.json` holds it.

    Attributes:
        status: finished; preempted (what was trained is saved, start me again); or failed.
        metrics: the last validation's means ("val_accuracy", "val_loss"), and "train_loss" of the same epoch.
        steps: optimizer steps over the whole run, resumed parts included.
        samples_per_second: training samples over training time; validation and saving are not counted.
        tokens_per_second: 0 if samples are not made of tokens.
        flops_per_second: of the model's own arithmetic, recomputation not counted; 0 if it is not known.
        matrix_flops_per_second: of a large matrix product in this precision on this device, measured at the start.
        mfu: model FLOP/s over that; 0 if it is not known.
        captured: whether steps were replays of a CUDA graph.
        not_captured: why they were not, if that was said.
        memory: bytes when the loop was ready, after the first steps and at the end; see `hotloop.MemoryReport`.
        data_wait_share: share of the training time spent waiting for data, 0 to 1.
        data_speed_share: of the speed with data on the device, 0 to 1; 0 if too few steps were measured.
        data_slow: what holds it up if that is less than 0.97: reading, decoding, engines, copying or host.
        data_advice: that in words, and what would help.
        decode: who decoded the images: cpu; hardware or dali where they did as well.
        weights_sha256: hash over names, shapes, types and bytes of the trained weights, empty unless finished.
        corrupt_files: each damaged file with its reason, in order of name.
        workers_replaced: data workers that died since this start, and were replaced.
        error: the three lines, if it failed.
        stopped_by: what asked for it, if it is preempted: a signal's name, or a notice's words.
    """

    status: Status
    name: str
    metrics: dict[str, float]
    epochs: int
    steps: int
    samples_per_second: float
    data_wait_share: float
    train_seconds: float
    weights_sha256: str = ""
    corrupt_files: list[dict[str, str]] = field(default_factory=list)
    precision: str = ""
    device: str = ""
    parameters: int = 0
    resumed_from: str = ""
    error: str = ""
    stopped_by: str = ""
    tokens_per_second: float = 0.0
    flops_per_second: float = 0.0
    matrix_flops_per_second: float = 0.0
    mfu: float = 0.0
    captured: bool = False
    not_captured: str = ""
    memory: dict[str, dict[str, int]] = field(default_factory=dict)
    data_speed_share: float = 0.0
    data_slow: str = ""
    data_advice: str = ""
    decode: str = ""
    workers_replaced: int = 0


@dataclass(frozen=True)
class Run:
    """The directory of one run, and the names in it."""

    directory: Path

    @property
    def job_file(self) -> Path:
        return self.directory / "job.toml"

    @property
    def machine_file(self) -> Path:
        return self.directory / "machine.json"

    @property
    def metrics_file(self) -> Path:
        return self.directory / "metrics.jsonl"

    @property
    def starts_file(self) -> Path:
        return self.directory / "starts.jsonl"

    @property
    def origin_file(self) -> Path:
        return self.directory / "origin.json"

    @property
    def result_file(self) -> Path:
        return self.directory / "result.json"

    @property
    def examples_file(self) -> Path:
        return self.directory / "examples.json"

    @property
    def report_file(self) -> Path:
        return self.directory / "report.html"

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"

    @property
    def events(self) -> Path:
        return self.directory / "events"

    @property
    def name(self) -> str:
        return self.directory.name

    def note_start(self, now: float, launched: str = "") -> History:
        """Note a start, in seconds since 1970, and say how often the run has been interrupted before.

        Args:
            launched: by what, as which job of it, and where; empty: by hand.
        """
        written = self.metrics_file.stat().st_mtime if self.metrics_file.exists() else None
        result = self.result()
        with suppress(OSError):  # a full disk stops the run where something is lost by it
            note_start(self.starts_file, now, written, result is None or result.status != "finished", launched)
        return read_history(self.starts_file)

    def write_start(self, job: Job, machine: Machine) -> None:
        """Keep the job as resolved and the machine; an older result is about an earlier part of the run: remove it."""
        write_atomic(self.machine_file, json.dumps(asdict(machine), indent=2) + "\n")  # with it there is a run
        write_atomic(self.job_file, job.to_toml())
        self.result_file.unlink(missing_ok=True)

    def write_origin(self, checkpoint: Path, position: tuple[int, int], command_hash: str) -> None:
        """Note the checkpoint that was named for this start to go on from, its epoch and step, and by which command."""
        origin = {
            "checkpoint": str(checkpoint),
            "epoch": position[0],
            "step": position[1],
            "command_hash": command_hash,
        }
        write_atomic(self.origin_file, json.dumps(origin) + "\n")

    def write_result(self, result: Result) -> None:
        """Write `result.json` whole or not at all."""
        write_atomic(self.result_file, json.dumps(plain(asdict(result)), indent=2, allow_nan=False) + "\n")

    def result(self) -> Result | None:
        """The result, if the run has ended by itself and its file can be read."""
        try:
            fields = json.loads(self.result_file.read_text())
            metrics = {name: math.nan if value is None else value for name, value in fields["metrics"].items()}
            return Result(**{**fields, "metrics": metrics})
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None

    def status(self) -> Status:
        """How the run stands; one that left no result and that no process holds was interrupted."""
        result = self.result()
        if result:
            return result.status
        return "running" if self._is_locked() else "interrupted"

    def metrics(self) -> list[dict[str, Any]]:
        """Every line of `metrics.jsonl`; a last line cut off by a crash is left out."""
        records = []
        text = self.metrics_file.read_text(errors="replace") if self.metrics_file.exists() else ""
        for line in text.splitlines():
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError:
                break
        return records

    def rewind_metrics(self, step: int) -> None:
        """Drop what was logged after `step`: the run continues from there."""
        records = [record for record in self.metrics() if record["step"] <= step]
        write_atomic(self.metrics_file, "".join(json.dumps(record) + "\n" for record in records))

    @property
    def exists(self) -> bool:
        """Whether a run was started in the directory."""
        return self.machine_file.is_file() and self.checkpoints.is_dir()

    @contextmanager
    def locked(self, patience_seconds: float = 0.0) -> Iterator[None]:
        """Hold the run for this process; the lock goes with the process, however it ends.

        Args:
            patience_seconds: to wait for another process's: on a network disk, that of a machine that is gone stays for
                a while.

        Raises:
            InputError: another process trains in this directory.
        """
        descriptor = os.open(self._lock_file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            until = time.monotonic() + patience_seconds
            while not lock_at_once(descriptor):
                if time.monotonic() >= until:
                    raise InputError(
                        f"{self.directory} is in use",
                        "another process trains in it",
                        "wait for it, or choose another run.dir",
                    )
                time.sleep(_LOOK_SECONDS)
            yield
        finally:
            os.close(descriptor)

    @property
    def _lock_file(self) -> Path:
        """Not the directory: Linux leaves a lock of that on NFS with the one machine that has taken it."""
        return self.directory / ".lock"

    def _is_locked(self) -> bool:
        try:
            descriptor = os.open(self._lock_file, os.O_RDWR)  # NFS locks what is open for writing
        except FileNotFoundError:
            return False
        except OSError:
            descriptor = os.open(self._lock_file, os.O_RDONLY)
        try:
            return not lock_at_once(descriptor)
        finally:
            os.close(descriptor)


_OF_A_START = re.compile(
    r"checkpoints|starts\.jsonl|origin\.json|\.lock|\.writable|"
    r"\.(machine\.json|starts\.jsonl|origin\.json|\.writable)\.\d+\.tmp"
)
"""What a start leaves that was killed before there was a run."""


def open_run(job: Job, now: datetime) -> Run:
    """The run's directory, made if it is not there: `run.dir`, or a new one named by job and time.

    `latest` in `run.root` points to the newest.

    Raises:
        InputError: the directory cannot be made or written, or holds something else than a run.
    """
    root = Path(job.run.root)
    directory = Path(job.run.dir) if job.run.dir else _unused(root / f"{job.name}-{now:%Y%m%d-%H%M%S}")
    run = Run(directory.absolute())
    try:
        _refuse_strangers(run)
        run.checkpoints.mkdir(parents=True, exist_ok=True)
        write_atomic(run.directory / ".writable", "")
        (run.directory / ".writable").unlink()
        if run.directory.parent == root.absolute():
            _point(root / "latest", run.name)
    except OSError as error:
        raise cannot_write(run.directory, error, InputError) from None
    return run


def require_run_place(job: Job) -> None:
    """Refuse what `open_run` would refuse, as far as that shows before anything is made.

    Raises:
        InputError: as `open_run`.
    """
    directory = Path(job.run.dir or job.run.root).absolute()
    try:
        if job.run.dir:
            _refuse_strangers(Run(directory))
        nearest = next(place for place in (directory, *directory.parents) if place.exists())
        if not nearest.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(nearest, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise cannot_write(directory, error, InputError) from None


def _refuse_strangers(run: Run) -> None:
    held = [] if run.exists or not run.directory.is_dir() else sorted(os.listdir(run.directory))
    if strangers := [name for name in held if not _OF_A_START.fullmatch(name)]:
        raise InputError(
            f"{run.directory} is not empty and no run",
            f"it holds {', '.join(strangers[:5])}{', ...' if len(strangers) > 5 else ''}",
            "choose a new folder: --set run.dir=runs/NAME",
        )


def list_runs(root: Path) -> list[Run]:
    """All runs in a folder, oldest first."""
    if not root.is_dir():
        return []
    found = [Run(entry) for entry in root.iterdir() if not entry.is_symlink() and (entry / "job.toml").is_file()]
    return sorted(found, key=lambda run: (run.job_file.stat().st_mtime, run.name))


def find_run(text: str, root: Path) -> Run:
    """The run meant by a path or by a name in `root` ("latest" too).

    Raises:
        InputError: there is none.
    """
    for directory in (Path(text), root / text):
        if (directory / "job.toml").is_file():
            return Run(directory.resolve())
    names = ", ".join(run.name for run in list_runs(root)[-3:])
    raise InputError(f"no run {text}", f"runs in {root}: {names or 'none'}", "hotloop runs")


def plain(value: Any) -> Any:
    """The same data with None for every NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _unused(directory: Path) -> Path:
    candidate, number = directory, 2
    while candidate.exists():
        candidate, number = directory.with_name(f"{directory.name}-{number}"), number + 1
    return candidate


def _point(link: Path, name: str) -> None:
    temporary = link.with_name(f".latest.{os.getpid()}")
    temporary.symlink_to(name)
    temporary.replace(link)
