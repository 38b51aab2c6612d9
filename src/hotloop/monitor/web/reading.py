"""Runs as they lie on the disk, whatever state they are in: being written, damaged, or too large to be read whole."""

import json
import os
import stat
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from hotloop.core.compare import flat
from hotloop.core.run import Result, Run, list_runs
from hotloop.monitor.web.curves import Chart, Curve

_MOST_METRICS, _MOST_REPORT, _MOST_FILE = 32 * 2**20, 64 * 2**20, 2**20
_MOST_REPORTS, _MOST_CHECKPOINTS = 32, 1000
_SHOWN = {"event", "step", "epoch", "loss", "learning_rate", "samples_per_second", "data_wait_share"}
_LARGEST = 1e300
"""Beyond, whole numbers are no floats any more, and differences of floats none either."""


@dataclass(frozen=True)
class Row:
    """A run in the list; `started` is when it was last, in seconds since 1970."""

    run: Run
    status: str
    result: Result | None
    started: float

    @property
    def name(self) -> str:
        return self.run.name


@dataclass(frozen=True)
class Records:
    """What `metrics.jsonl` holds.

    Attributes:
        left_out: bytes at its beginning that were not read.
        damaged: lines that are no records; one that is just being written is not counted.
    """

    records: Sequence[dict[str, Any]]
    left_out: int = 0
    damaged: int = 0


def read_rows(root: Path) -> list[Row]:
    """All runs in a folder, oldest first; costs about 0.1 ms each."""
    rows = []
    for run in list_runs(root):
        try:
            rows.append(_row(run))
        except OSError:  # it was removed meanwhile, or is not this user's to read
            continue
    return rows


def find_row(root: Path, name: str) -> Row | None:
    """The run of that name in a folder. It is looked up in the list: no path is made of a name that was asked for."""
    run = next((run for run in list_runs(root) if run.name == name), None)
    try:
        return _row(run) if run else None
    except FileNotFoundError:  # it has just been removed
        return None


def _row(run: Run) -> Row:
    readable = not run.result_file.exists() or run.result_file.stat().st_size <= _MOST_FILE
    status = run.status() if readable else "damaged"
    return Row(run, str(status), run.result() if readable else None, _started(run))


def _started(run: Run) -> float:
    """As the run noted it; where it did not, when its job was written, which is what a copy changes."""
    try:
        noted = float(json.loads(read_text(run.starts_file).splitlines()[-1])["time"])
        datetime.fromtimestamp(noted)
    except (ValueError, OverflowError, OSError, IndexError, KeyError, TypeError, RecursionError):
        return run.job_file.stat().st_mtime
    return noted


def read_records(file: Path, most_bytes: int = _MOST_METRICS) -> Records:
    """The end of a file of records; never raises for what it holds."""
    content, left_out = _end_of(file, most_bytes)
    lines = content.split(b"\n")
    whole, rest = lines[:-1], lines[-1]
    found = [_record(line) for line in whole if line.strip()]
    last = _record(rest) if rest.strip() else None
    good = [record for record in [*found, last] if record is not None]
    return Records(good, left_out, sum(record is None for record in found))


def _end_of(file: Path, most_bytes: int) -> tuple[bytes, int]:
    try:
        with _opened(file) as opened:
            left_out = max(0, os.fstat(opened.fileno()).st_size - most_bytes)
            opened.seek(left_out)
            content = opened.read(most_bytes)
    except OSError:
        return b"", 0
    if left_out:
        cut = content.find(b"\n") + 1
        return content[cut:], left_out + cut
    return content, 0


def _opened(file: Path) -> Any:
    """A file itself: no link, no pipe.

    Raises:
        OSError: it is something else, or cannot be read.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{file} is no file")
    return os.fdopen(descriptor, "rb")


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    known = isinstance(record, dict) and record.get("event") in ("step", "epoch", "checkpoint")
    if not known or not is_number(record.get("step")):
        return None
    return {key: value for key, value in record.items() if key in _SHOWN or key.startswith("val_")}


def is_number(value: object) -> bool:
    """Whether a curve can have it."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST < value < _LARGEST


def read_text(file: Path, most_bytes: int = _MOST_FILE) -> str:
    """A small file's text; empty if it is not there, says so if it is too large."""
    try:
        with _opened(file) as opened:
            content: bytes = opened.read(most_bytes + 1)
    except OSError:
        return ""
    return content.decode(errors="replace") if len(content) <= most_bytes else f"{file.name} is too large to be shown\n"


def settings(run: Run) -> dict[str, Any]:
    """The job as one table with dotted keys; empty if it cannot be read."""
    try:
        return flat(tomllib.loads(read_text(run.job_file)))
    except (ValueError, RecursionError):
        return {}


def checkpoints(run: Run) -> list[str]:
    """Names of those that are whole, the newest first."""
    try:
        with os.scandir(run.checkpoints) as entries:
            found = [(entry.stat().st_mtime, entry.name) for entry in entries if not entry.name.startswith(".")]
    except OSError:
        return []
    return [name for _, name in sorted(found, reverse=True)[:_MOST_CHECKPOINTS]]


def reports(run: Run) -> dict[str, str]:
    """Pages that lie in a run's directory, or one folder below: path -> what a profile's verdict is, if it is one."""
    found: dict[str, str] = {}
    for pattern in ("*.html", "*/*.html"):
        for file in sorted(run.directory.glob(pattern)):
            if file.is_file() and not file.is_symlink() and not file.parent.is_symlink() and len(found) < _MOST_REPORTS:
                found[str(file.relative_to(run.directory))] = _verdict(file.parent)
    return found


def _verdict(folder: Path) -> str:
    try:
        return str(json.loads(read_text(folder / "profile.json"))["verdict"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


def read_report(run: Run, path: str) -> bytes | None:
    """One of `reports`, None for any other path."""
    if path not in reports(run):
        return None
    try:
        with _opened(run.directory / path) as opened:
            content: bytes = opened.read(_MOST_REPORT + 1)
    except OSError:
        return None
    return (
        content if len(content) <= _MOST_REPORT else b"<!doctype html><title>Too large</title>The page is too large.\n"
    )


def charts(named: Sequence[tuple[str, Records]]) -> list[Chart]:
    """Curves of one run, or of several over each other."""
    several = len(named) > 1

    def curves(key: str, event: str, unit: str, label: str = "") -> list[Curve]:
        found = []
        for name, records in named:
            offset = 1 if unit == "epoch" else 0  # epochs count from 0 in files, from 1 for people
            points = [
                (record[unit] + offset, record[key])
                for record in records.records
                if record["event"] == event and is_number(record.get(unit)) and is_number(record.get(key))
            ]
            if points:
                found.append(Curve(name if several else label, sorted(points)))
        return found

    scores = sorted({key for _, records in named for record in records.records for key in record
                     if record["event"] == "epoch" and key.startswith("val_")})  # fmt: skip
    loss = curves("loss", "step", "step", "training")
    both = loss if several else loss + curves("val_loss", "epoch", "step", "validation")
    made = [Chart("Loss", "step", both)]
    made += [
        Chart(f"Validation: {name.removeprefix('val_')}", "epoch", curves(name, "epoch", "epoch")) for name in scores
        if several or name != "val_loss"
    ]  # fmt: skip
    made += [
        Chart("Samples per second", "step", curves("samples_per_second", "step", "step"), from_zero=True),
        Chart("Time waiting for data", "step", curves("data_wait_share", "step", "step"), percent=True),
        Chart("Learning rate", "step", curves("learning_rate", "step", "step"), from_zero=True),
    ]
    return [chart for chart in made if chart.curves]
