"""What happens in each process that was started under `hotloop`."""

import atexit
import json
import os
import signal
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from fcntl import F_DUPFD_CLOEXEC, fcntl
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from hotloop.attach.imports import when_imported

VARIABLE = "HOTLOOP_ATTACH"
"""The environment variable that says what is to be started, as JSON."""
INTERRUPTS = "interrupts"
"""A pipe in the folder to which processes write the signals that come to them, one byte each."""
_FAR = 700
"""Descriptors from here on: what closes all that it knows of and opens others, a daemon say, gets lower ones."""


@dataclass(frozen=True)
class Attachment:
    """What is started in every process.

    Attributes:
        entries: by the name of a module, "module:function", called with that module, once it is imported, and this.
        folder: where processes leave what they find.
        settings: of the entries' own.
    """

    entries: dict[str, str]
    folder: str
    settings: dict[str, Any]

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def start() -> None:
    """Begin what the environment asks for, as soon as what it waits for is imported."""
    asked = os.environ.get(VARIABLE)
    if not asked:
        return
    attachment = Attachment(**json.loads(asked))
    if not Path(attachment.folder).is_dir():  # the one that waited for this process has gone
        return
    (Path(attachment.folder) / f"attached-{os.getpid()}").touch()
    _note_interrupts(Path(attachment.folder))
    atexit.register(_stay_interrupted)  # before all others, so it runs after them
    for imported, entry in attachment.entries.items():
        when_imported(imported, partial(_begin, entry, attachment))


def tell(text: str) -> None:
    """Write a line to the script's error output, if it has not closed it."""
    with suppress(AttributeError, OSError, ValueError):
        sys.stderr.write(f"hotloop: {text}\n")


def _begin(entry: str, attachment: Attachment, imported: ModuleType) -> None:
    module, _, name = entry.partition(":")
    try:
        getattr(import_module(module), name)(imported, attachment)
    except Exception as error:  # the user's process goes on in any case
        print(f"hotloop could not start in this process: {type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201


def _stay_interrupted() -> None:
    """A process that Ctrl-C has ended says so by its exit code, unless a string is executed on its way out, as making
    a dataclass does: then Python forgets, and the code is 1.
    """
    if isinstance(getattr(sys, "last_value", None), KeyboardInterrupt):
        with suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")  # noqa: S102 - it is remembered again


def _note_interrupts(folder: Path) -> None:
    """Whoever started this process passes on a SIGINT unless it came here as well."""
    with suppress(OSError, ValueError):  # it has gone; or few descriptors are allowed
        pipe = os.open(folder / INTERRUPTS, os.O_WRONLY | os.O_NONBLOCK)
        try:
            signal.set_wakeup_fd(fcntl(pipe, F_DUPFD_CLOEXEC, _FAR), warn_on_full_buffer=False)
        finally:
            os.close(pipe)
