"""This machine as a record: all readers at once, each with its limit."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hotloop import __version__
from hotloop.core.files import user_cache
from hotloop.doctor.readers import ANSWER
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
    """What is read, by a name for messages. Looks at nothing itself: a folder's server may be dead.

    Args:
        data: folders with data.
        rates: whether they are timed.
    """
    places = {os.environ.get("TMPDIR") or "/tmp": "tmp"}  # noqa: S108 - looked at, not written to
    cache = user_cache()
    if cache:
        places.setdefault(str(cache.parent), "cache")
    with suppress(OSError):  # the current folder may be gone
        places.setdefault(os.getcwd(), "runs")
    folders = [(path, role, "0") for path, role in places.items()]
    folders += [(os.path.abspath(path), "data", str(_READ_SECONDS if rates else 0)) for path in data]
    return {
        "system": Reader("system"),
        "nvml": Reader("nvml", seconds=60.0),  # eight cards without persistence take half a minute to start
        "devices": Reader("devices", seconds=60.0),
        "environment": Reader("environment"),
        "packages": Reader("packages"),
        "torch": Reader("torch", seconds=90.0),
        **{f"folder {path}": Reader("storage", (path, role, timed)) for path, role, timed in folders},
    }


Answers = Callable[[Mapping[str, Reader]], tuple[dict[str, Any], dict[str, str]]]
"""Reads: what each gave, and why others gave nothing."""


def by_processes(asked: Mapping[str, Reader]) -> tuple[dict[str, Any], dict[str, str]]:
    """Start all readers, each in a process, and take what they print; one past its limit is left behind."""
    started = time.monotonic()
    outputs = {name: os.memfd_create(reader.name) for name, reader in asked.items()}  # no disk: it may be full
    found, failed = {}, {}
    try:
        processes = {name: _start(reader, outputs[name]) for name, reader in asked.items()}
        for name, process in processes.items():
            left = asked[name].seconds - (time.monotonic() - started)
            try:
                code = process.wait(max(0.0, left))
            except subprocess.TimeoutExpired:
                _leave(process)
                failed[name] = f"no answer within {asked[name].seconds:.0f} s"
                continue
            lines = _content(outputs[name]).splitlines()
            answer = next((line for line in reversed(lines) if line.startswith(ANSWER)), None)
            if answer is None:
                failed[name] = f"ended with code {code}: {lines[-1] if lines else 'no output'}"[:300]
            else:
                found[name] = json.loads(answer.removeprefix(ANSWER))
    finally:
        for descriptor in outputs.values():
            os.close(descriptor)
    return found, failed


def _start(reader: Reader, output: int) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(  # noqa: S603 - this package's own modules
        own_module("hotloop.doctor.readers", reader.name, *reader.arguments),
        stdin=subprocess.DEVNULL, stdout=output, stderr=output,
    )  # fmt: skip


def own_module(module: str, *arguments: str) -> list[str]:
    """The command that runs one of this package's modules, from wherever it is imported here.

    Its folder comes last: before the standard library, whatever else is installed beside it would hide that.
    """
    source = str(Path(__file__).parents[2])
    code = f"import runpy, sys; sys.path.append({source!r}); runpy.run_module({module!r}, run_name='__main__')"
    return [sys.executable, "-P", "-c", code, *arguments]


def _content(descriptor: int) -> str:
    os.lseek(descriptor, 0, os.SEEK_SET)
    with open(descriptor, "rb", closefd=False) as file:
        return file.read().decode(errors="replace")


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
    nvml = found.get("nvml", {})
    parts = {
        **found.get("system", {}),
        "driver": {**found.get("devices", {}), **nvml.get("driver", {})},
        **{key: nvml[key] for key in ("gpus", "pairs") if key in nvml},
        **found.get("packages", {}),
        **found.get("environment", {}),
        "torch": found.get("torch"),
        "folders": [found[name] for name in asked if name.startswith("folder ") and name in found],
    }
    for name, part in list(parts.items()):  # one odd value costs its part alone
        try:
            MachineRecord.model_validate({name: part})
        except ValidationError as error:
            unread[name] = f"{error.errors()[0]['loc']}: {error.errors()[0]['msg']}"
            del parts[name]
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return MachineRecord.model_validate({"hotloop": __version__, "date": now, **parts, "unread": unread})
