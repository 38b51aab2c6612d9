"""A process on this machine that outlives the command which has started it."""

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hotloop.core.files import write_atomic
from hotloop.core.process import started
from hotloop.launch.record import Launch
from hotloop.launch.request import Request


def start_detached(command: Sequence[str], request: Request, files: Sequence[int] = ()) -> str:
    """Start a program that writes into the launch's log; its process number.

    Args:
        files: descriptors that it has open, too.
    """
    with (request.folder / "log.txt").open("ab") as log:
        process = subprocess.Popen(  # noqa: S603 - our own command
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=files,
        )
    write_atomic(request.folder / "process", f"{process.pid} {started(process.pid) or ''}\n")
    process.returncode = 0  # it is not ours to wait for: it goes on after this command
    return str(process.pid)


def is_alive(launch: Launch) -> bool:
    """Whether its process is there, and is no other one that has taken its number since."""
    file = Path(launch.folder) / "process"
    return file.exists() and bool(begun := started(int(launch.id))) and file.read_text().split()[1:] == [str(begun)]


def terminate(launch: Launch) -> None:
    """Send it SIGTERM, if it is there."""
    if is_alive(launch):
        with suppress(ProcessLookupError):
            os.kill(int(launch.id), signal.SIGTERM)
