"""A `hotloop train` of several ranks that a bench watches by its metrics and ends once it has seen enough."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

Records = list[dict[str, Any]]


def train_until(job: Path, metrics: Path, enough: Callable[[Records], bool], most_seconds: float) -> Records:
    """Train, compiling counted at most for so long; what it has recorded by then.

    It is killed, as any other end is with a checkpoint, of 96 GB for an 8B model.
    """
    command = [sys.executable, "-m", "hotloop", "train", str(job)]
    until = time.monotonic() + most_seconds
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a bench which is cut off ends its ranks
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            while process.poll() is None and not enough(records_of(metrics)) and time.monotonic() < until:
                time.sleep(0.2)
        finally:
            _end_ranks(process.pid)
    signal.signal(signal.SIGTERM, before)
    return records_of(metrics)


def records_of(metrics: Path) -> Records:
    """All that is whole: a line may be being written."""
    if not metrics.exists():
        return []
    return [json.loads(line) for line in metrics.read_text().splitlines() if line.endswith("}")]


def of_event(records: Records, event: str) -> Records:
    return [record for record in records if record["event"] == event]


def _end_ranks(parent: int) -> None:
    """Kill the processes that train; the one that has started them ends then."""
    for process in processes_with(f"HOTLOOP_RANKS_PARENT={parent}"):
        with suppress(OSError):
            os.kill(int(process.name), signal.SIGKILL)


def processes_with(variable: str) -> Iterator[Path]:
    """In /proc, those that were started with "NAME=value" in their environment."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if variable.encode() in (process / "environ").read_bytes().split(b"\0"):
                yield process
