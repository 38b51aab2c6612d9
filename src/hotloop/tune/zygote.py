"""A process that has imported what trials need, and forks for each of them: importing torch and its compiler takes 6 s
on two cores, and 16 s were seen beside an H200.
"""

import gc
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from hotloop.tune.children import begin_child, signals_held


class Zygote:
    """Starts when it is first asked to fork; ends, with what it has forked, when it is closed or this process ends.

    Args:
        module: that it imports first, and that forks call functions of. To import it may not use the GPU: no fork
            could use it then.
        environment: of the process that forks: of what is read when torch is imported, say, a fork can have no other.
    """

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        self._module = module
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def close(self) -> None:
        """May be called again."""
        if self._process and self._connection:
            self._connection.close()
            self._process.kill()
            self._process.wait()
            self._process = self._connection = None

    def fork(self, function: str, arguments: tuple[Any, ...], environment: Mapping[str, str], output: Path) -> "Forked":
        """A process that calls a function of the module, in a session of its own. The one before it has ended.

        Args:
            function: its name.
            arguments: are pickled.
            output: file that takes what it prints; and, of the first, what is printed while modules are imported.

        Raises:
            OSError: modules could not be imported, or the zygote was killed.
        """
        connection = self._started(output)
        try:
            connection.send((function, arguments, dict(environment), output))
            return Forked(connection, connection.recv())
        except (EOFError, ConnectionError):
            self.close()
            said = output.read_text(errors="replace") if output.exists() else "what forks them was killed"
            raise ChildProcessError(f"no trial could be forked; {said[-_TOLD:]}") from None
        except BaseException:  # Ctrl-C: what was forked meanwhile is not known
            self.close()
            raise

    def _started(self, output: Path) -> Connection:
        if self._process and self._process.poll() is not None:  # killed since the last trial, for want of memory, say
            self.close()
        if not self._connection:
            ours, its = Pipe()
            # -P: a file of the user's that is named like a library does not stand for it.
            command = [sys.executable, "-P", "-m", __name__, self._module, str(its.fileno())]
            with its, output.open("wb") as printed, signals_held() as before:
                process = subprocess.Popen(  # noqa: S603 - ourselves
                    command, env={**self._environment}, stdin=subprocess.DEVNULL, stdout=printed, stderr=printed,
                    pass_fds=[its.fileno()], start_new_session=True, preexec_fn=lambda: begin_child(before),
                )  # fmt: skip
            self._process, self._connection = process, ours
        return self._connection


_TOLD = 2000


class Forked:
    """A forked process, as subprocess knows one."""

    def __init__(self, connection: Connection, pid: int) -> None:
        self.pid = pid
        self._connection = connection
        self._code: int | None = None

    def poll(self) -> int | None:
        """Its exit code, if it has ended; minus the signal that has ended it."""
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code.

        Raises:
            subprocess.TimeoutExpired: it goes on.
        """
        if self._code is None:
            try:
                if not self._connection.poll(timeout):
                    raise subprocess.TimeoutExpired("a fork", timeout or 0.0)
                self._code = self._connection.recv()
            except (EOFError, OSError):  # with the zygote
                self._code = -signal.SIGKILL
        return self._code


def _serve(module: ModuleType, connection: Connection) -> None:
    while True:
        try:
            function, arguments, environment, output = connection.recv()
        except EOFError:
            return
        zygote, child = os.getpid(), os.fork()
        if not child:
            break
        connection.send(child)
        connection.send(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    connection.close()
    os.setsid()
    begin_child(signal.pthread_sigmask(signal.SIG_BLOCK, []))
    if os.getppid() != zygote:  # it has ended before
        return
    written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(written, descriptor)
    os.close(written)
    os.environ.clear()
    os.environ.update(environment)
    getattr(module, function)(*arguments)


if __name__ == "__main__":
    imported = importlib.import_module(sys.argv[1])
    gc.freeze()  # else each fork copies all of that memory, only to free it at its end: 2 s
    _serve(imported, Connection(int(sys.argv[2])))
