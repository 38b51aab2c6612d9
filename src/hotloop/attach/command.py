"""Run somebody's command with hotloop inside of it."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hotloop.attach.inside import INTERRUPTS, VARIABLE, Attachment
from hotloop.core.errors import InputError

BOOTSTRAP = Path(__file__).parent / "bootstrap"

NOT_ENTERED = "it started no Python, or one that -I, -E, -S or a PYTHONPATH set in the command keep hotloop out of"
"""Why nothing was seen of a command."""
_EXAMPLE = "a program that is there, behind --, such as: -- python train.py"
_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_COMES_SECONDS = 1.0
"""Within which a SIGINT to our process group has come to the command as well, on a busy machine too."""
_LOOK_SECONDS = 0.01


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
        code: its exit code; 128 and the signal's number if a signal ended it, as shells say it.
        signals: that came from outside.
        entered: whether a Python that hotloop could enter was started in it.
    """

    code: int
    signals: frozenset[int]
    entered: bool


def run_attached(
    command: Sequence[str], attachment: Attachment, environment: Mapping[str, str], output: int | None = None
) -> Ended:
    """Run a command to its end; its input and output are ours, and so are signals.

    Args:
        output: a file descriptor for what it writes to its standard output, in place of ours.

    Raises:
        InputError: there is no such program.
    """
    inside = attached_environment(command, attachment, environment)
    with _interrupts(Path(attachment.folder)) as pipe, _forwarded_signals(pipe) as (children, heard):
        try:
            child = subprocess.Popen(command, env=inside, stdout=output)  # noqa: S603 - the user's own command
        except OSError as error:
            raise InputError(f"{command[0]} cannot be started", error.strerror or str(error), _EXAMPLE) from error
        children.append(child)
        code = child.wait()
    code = 128 - code if code < 0 else code
    # A script that takes SIGTERM as Ctrl-C, see hotloop.accelerate.termination, was ended by SIGTERM all the same.
    terminated = code == 128 + signal.SIGINT and signal.SIGTERM in heard
    entered = any(Path(attachment.folder).glob("attached-*"))
    return Ended(128 + signal.SIGTERM if terminated else code, frozenset(heard), entered)


def attached_environment(
    command: Sequence[str], attachment: Attachment, environment: Mapping[str, str]
) -> dict[str, str]:
    """The environment in which a command's Python processes start what is asked for.

    Raises:
        InputError: there is no such program.
    """
    if not shutil.which(command[0], path=environment.get("PATH")):
        cause = "a command is a program and its arguments, as you would type them"
        raise InputError(f"{command[0]}: no such program", cause, _EXAMPLE)
    path = [str(BOOTSTRAP), *filter(None, [environment.get("PYTHONPATH")])]
    quiet = {"KINETO_LOG_LEVEL": "99"}  # torch's profiler says on the error output that there is no GPU
    return {**quiet, **environment, "PYTHONPATH": os.pathsep.join(path), VARIABLE: attachment.to_json()}


@contextmanager
def _interrupts(folder: Path) -> Iterator[int]:
    """A pipe from which to read what signals come to the command's Python processes."""
    name = folder / INTERRUPTS
    os.mkfifo(name)
    pipe = os.open(name, os.O_RDWR | os.O_NONBLOCK)
    try:
        yield pipe
    finally:
        os.close(pipe)
        name.unlink()


@contextmanager
def _forwarded_signals(interrupts: int) -> Iterator[tuple[list["subprocess.Popen[bytes]"], set[int]]]:
    """What a scheduler sends us goes to the command, and is noted. So does a SIGINT that is sent to us alone; Ctrl-C
    reaches the command by itself, being of the same group. It is not ignored here, which the command would inherit.
    """
    children: list[subprocess.Popen[bytes]] = []
    heard: set[int] = set()

    def forward(number: int, frame: object) -> None:
        heard.add(number)
        for child in children:
            child.send_signal(number)

    def interrupt(number: int, frame: object) -> None:
        heard.add(number)
        if not _came(interrupts, number):
            forward(number, frame)

    known = [number for number in _FORWARDED if signal.getsignal(number) is not signal.SIG_IGN]  # nohup's stay so
    before = {number: signal.signal(number, forward) for number in known}
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        before[signal.SIGINT] = signal.signal(signal.SIGINT, interrupt)
    try:
        yield children, heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _came(pipe: int, number: int) -> bool:
    """Whether a process writes now that a signal has come to it, too."""
    until = time.monotonic() + _COMES_SECONDS
    while time.monotonic() < until:
        with suppress(BlockingIOError):
            if number in os.read(pipe, 65536):
                return True
        time.sleep(_LOOK_SECONDS)
    return False
