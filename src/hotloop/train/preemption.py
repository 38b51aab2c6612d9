"""Notice that the end is near: signals and a thread that watches set a flag, the loop looks at it between steps."""

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from weakref import WeakSet

from hotloop.core.stopping import stop_at_once
from hotloop.train.notices import Look, looks
from hotloop.train.world import PARENT

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""SIGUSR1: what Slurm sends ahead of a time limit, `#SBATCH --signal=USR1@120` for example."""

_LATE_SECONDS = 5.0
"""By which a signal is read after it has come, where Python's lock is held or the machine is busy."""
_RANKS_SECONDS, _STOP_SECONDS, _GRACE_SECONDS, _JOIN_SECONDS = 0.2, 0.5, 1.0, 2.0


class Preemption:
    """Turns SIGTERM, SIGUSR1, a first SIGINT, a cloud's notice or a file into a request to save and stop; a context
    manager.

    The handler only sets a flag: what it interrupts may be anything. A second SIGINT interrupts at once, as usual. A
    handler that the program has for SIGUSR1 stays. Outside the main thread signals are not watched, as Python allows
    no handler there.

    Args:
        cloud: whose metadata service is asked: "aws", "gcp", "azure", "off", or "auto": the one that the machine's
            firmware names, if any.
        address: of that service; empty: the link-local address at which all of them have it.
        file: a notice, once it exists; empty: none.
        every_seconds: between two looks. A look takes a millisecond, in a thread of its own.
        warn: told once if the service does not answer.
        ranks_folder: of a rank that `hotloop train` has started: a file "stop" in it, which holds the reason, is the
            notice. SIGTERM without such a file means to end at once: what starts ranks ends all when one is lost.
        stop_file: of what has launched the run; once it exists, what it holds is the notice. Looked at twice a second.
        last: the process only ends after this: signals that come then are ignored.

    Raises:
        InputError: there is no such cloud.
    """

    def __init__(
        self, cloud: str = "auto", address: str = "", file: str = "", every_seconds: float = 5.0,
        warn: Callable[[str], None] = lambda text: None, ranks_folder: str = "", stop_file: str = "",
        last: bool = False,
    ) -> None:  # fmt: skip
        self._reason = ""
        self._previous: dict[signal.Signals, signal._HANDLER] = {}
        self._looks = looks(cloud, address, file)
        self._signals: tuple[signal.Signals, ...] = _SIGNALS
        self._every_seconds = every_seconds
        self._stop: Path | None = None  # of a rank
        self._parent = os.environ.get(PARENT, "")
        self._heard: tuple[int, int] | None = None
        self._last = last
        if stop_file:
            self._look_often(Path(stop_file), _STOP_SECONDS)
        if ranks_folder:
            self._stop = Path(ranks_folder) / "stop"
            self._look_often(self._stop, _RANKS_SECONDS)
        self._warn = warn
        self._end = threading.Event()
        self._watchers: list[threading.Thread] = []

    def _look_often(self, stop: Path, seconds: float) -> None:
        """At a file whose text is the notice; at everything else as seldom as before."""
        seldom = {name: _seldom(look, self._every_seconds) for name, look in self._looks.items()}
        self._looks = {str(stop): partial(_read, stop), **seldom}
        self._every_seconds = min(self._every_seconds, seconds)

    @property
    def requested(self) -> str:
        """What asked to stop: the name of a signal, or the notice's words; empty while nothing has."""
        return self._reason

    def __enter__(self) -> "Preemption":
        _entered.add(self)
        if threading.current_thread() is threading.main_thread():
            for number in self._signals:
                if number != signal.SIGUSR1 or signal.getsignal(number) in (signal.SIG_DFL, stop_at_once):
                    self._previous[number] = signal.signal(number, self._notice)
            if self._stop:  # written to when a signal comes, also while the main thread waits for other ranks
                self._heard = os.pipe2(os.O_NONBLOCK)
                signal.set_wakeup_fd(self._heard[1], warn_on_full_buffer=False)
        self._end.clear()
        # One each: a file on a mount that stands still makes nobody deaf for the rest.
        targets = [partial(self._watch, *watched) for watched in self._looks.items()]
        if self._stop and self._heard:
            targets.append(partial(self._end_if_told, self._heard[0], self._stop))
        self._watchers = [threading.Thread(target=each, name="hotloop-notices", daemon=True) for each in targets]
        for watcher in self._watchers:
            watcher.start()
        return self

    def leave_to_parent(self) -> None:
        """In a child that the user's code has forked: a signal to it is no notice, and none in the parent's pipe."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._heard:
            signal.set_wakeup_fd(-1)

    def __exit__(self, *_: object) -> None:
        _entered.discard(self)
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_IGN if self._last else handler)
        self._previous.clear()
        self._end.set()
        for watcher in self._watchers:
            watcher.join(_JOIN_SECONDS)
        if self._heard:
            signal.set_wakeup_fd(-1)
            for descriptor in self._heard:
                os.close(descriptor)
            self._heard = None

    def _notice(self, number: int, frame: FrameType | None) -> None:
        if self._stop and number == signal.SIGTERM:
            return  # see _end_if_told
        self._reason = signal.Signals(number).name
        if number == signal.SIGINT and not self._stop:  # ranks are ended by what has started them
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _watch(self, name: str, look: Look) -> None:
        warned = False
        while not self._reason:
            try:
                if (found := look()) and not self._reason:  # a signal or another look may have come first meanwhile
                    self._reason = found
            except Exception as error:  # whatever a service that is not the one it was taken for may say
                if not warned:
                    self._warn(f"no notice of preemption can come from {name}: {error}")
                warned = True
            if self._end.wait(self._every_seconds):
                return

    @property
    def _is_orphan(self) -> bool:
        """Whether who has started this rank is gone: nobody writes the file, and a signal tells of no lost ranks."""
        return self._parent != "" and os.getppid() != int(self._parent)

    def _end_if_told(self, heard: int, stop: Path) -> None:
        """SIGTERM that comes to all processes of a container is a notice, as the one that has started this rank says in
        the file; from that one alone, it is the end, also of a rank that is about to save: others are gone.
        """
        told = 0.0
        while not self._end.wait(_RANKS_SECONDS):
            with suppress(BlockingIOError):
                if signal.SIGTERM in os.read(heard, 64):
                    told = time.time()
            if told and time.time() - told > _GRACE_SECONDS:
                if not self._is_orphan and not _is_since(stop, told - _LATE_SECONDS):
                    os._exit(128 + signal.SIGTERM)
                told = 0.0


_entered: "WeakSet[Preemption]" = WeakSet()


def _leave_to_parent() -> None:
    for each in _entered:
        each.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)


def _seldom(look: Look, every_seconds: float) -> Look:
    """The same, but not more often; nothing in between."""
    due = time.monotonic()

    def looked() -> str:
        nonlocal due
        if time.monotonic() < due:
            return ""
        due = time.monotonic() + every_seconds
        return look()

    return looked


def _is_since(file: Path, seconds: float) -> bool:
    """Whether a file was written since then."""
    try:
        return file.stat().st_mtime >= seconds
    except OSError:
        return False


def _read(file: Path) -> str:
    return file.read_text() if file.exists() else ""
