"""This machine as a record: all readers at once, each with its limit."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hotloop import __version__
from hotloop.core.files import user_cache
from hotloop.doctor.record import MachineRecord

_READ_SECONDS = 1.5
"""For which a folder of data is read."""


@dataclass(frozen=True)
class Reader:
    """A module of `hotloop.doctor.readers` with the arguments of its `read`, and the limit in seconds."""

    name: str
    arguments: tuple[str, ...] = ()
    seconds: float = 10.0


def readers(data: Sequence[Path], *, rates: bool) -> dict[str, Reader]:
    """What is read, by a name for messages.

    Args:
        data: folders with data.
        rates: whether they are timed.
    """
    places = {Path(tempfile.gettempdir()): "tmp", (user_cache() or Path("/")).parent: "cache", Path.cwd(): "runs"}
    folders = [(path, role, "0") for path, role in places.items() if path.exists()]
    folders += [(path.absolute(), "data", str(_READ_SECONDS if rates else 0)) for path in data]
    return {
        "system": Reader("system"),
        "nvml": Reader("nvml"),
        "environment": Reader("environment"),
        "packages": Reader("packages"),
        "torch": Reader("torch", seconds=60.0),
        **{f"folder {path}": Reader("storage", (str(path), role, timed)) for path, role, timed in folders},
    }


Answers = Callable[[Mapping[str, Reader]], tuple[dict[str, Any], dict[str, str]]]
"""Reads: what each gave, and why others gave nothing."""


def by_processes(asked: Mapping[str, Reader]) -> tuple[dict[str, Any], dict[str, str]]:
    """Start all readers, each in a process, and take what they print; one past its limit is left behind."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hotloop-doctor-") as folder:
        processes = {name: _start(reader, Path(folder, str(n))) for n, (name, reader) in enumerate(asked.items())}
        found, failed = {}, {}
        for number, (name, process) in enumerate(processes.items()):
            left = asked[name].seconds - (time.monotonic() - started)
            try:
                code = process.wait(max(0.0, left))
            except subprocess.TimeoutExpired:
                _leave(process)
                failed[name] = f"no answer within {asked[name].seconds:.0f} s"
                continue
            lines = Path(folder, str(number)).read_text(errors="replace").strip().splitlines()
            try:
                found[name] = json.loads(lines[-1])
            except (IndexError, ValueError):
                failed[name] = f"ended with code {code}: {lines[-1] if lines else 'no output'}"[:300]
    return found, failed


def _start(reader: Reader, output: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-P", "-m", "hotloop.doctor.readers", reader.name, *reader.arguments]
    source = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])}
    with output.open("wb") as file:
        return subprocess.Popen(  # noqa: S603 - this package's own modules
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=environment,
        )  # fmt: skip


def _leave(process: "subprocess.Popen[bytes]") -> None:
    """One that the driver or a dead file server holds cannot be killed, and is not waited for."""
    process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(0.2)


def read_record(data: Sequence[Path] = (), *, rates: bool = False, answers: Answers = by_processes) -> MachineRecord:
    """This machine.

    Args:
        data: folders with data to look at.
        rates: also read them for 1.5 s each, at once.
        answers: gives what the readers read.
    """
    asked = readers(data, rates=rates)
    found, unread = answers(asked)
    system, nvml = found.get("system", {}), found.get("nvml", {})
    packages, environment = found.get("packages", {}), found.get("environment", {})
    return MachineRecord.model_validate({
        "hotloop": __version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **{key: value for key, value in system.items() if key != "driver"},
        "driver": {**system.get("driver", {}), **nvml.get("driver", {})},
        **{key: nvml[key] for key in ("gpus", "pairs") if key in nvml},
        **packages,
        **environment,
        "torch": found.get("torch"),
        "folders": [found[name] for name in asked if name.startswith("folder ") and name in found],
        "unread": unread,
    })  # fmt: skip
