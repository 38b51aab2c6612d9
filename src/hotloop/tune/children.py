"""Processes that are started for trials."""

import ctypes
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

OUTPUT = "output"
"""In a trial's folder: what it has printed."""


class Child(Protocol):
    """A process that was started, as subprocess knows it."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...


def command(arguments: Sequence[str], environment: Mapping[str, str], folder: Path) -> Child:
    """Start a command in a session of its own."""
    # A Ctrl-C while Python forks is lost: it ignores what its hooks around a fork raise.
    with (folder / OUTPUT).open("wb") as output, signals_held() as before:
        return subprocess.Popen(  # noqa: S603 - the user's own
            arguments, env={**environment}, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True, preexec_fn=partial(begin_child, before),
        )  # fmt: skip


@contextmanager
def removed_if_it_fails(folder: Path) -> Iterator[None]:
    """Ctrl-C while a child starts leaves nothing of it."""
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def begin_child(heard: Set[int]) -> None:
    """A training that nobody waits for any more ends, whatever has ended its parent; and it hears signals."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_SETMASK, heard)


_PR_SET_PDEATHSIG = 1
"""<sys/prctl.h>"""


@contextmanager
def signals_held() -> Iterator[Set[int]]:
    """Ctrl-C and a scheduler's signals come afterwards, unless the kernel hands them to a library's thread. Gives those
    that were held before.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield before
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
