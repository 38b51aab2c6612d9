"""A training that no process of ours looks after: a thread of its own tells where it stands still, and ends a step that
stays so.
"""

import os
import sys
import threading
from contextlib import suppress
from types import FrameType, TracebackType

from hotloop.core.errors import HotloopError
from hotloop.core.units import count, format_seconds
from hotloop.train.collectives import last_collective
from hotloop.train.heartbeat import Heart

_LOOK_SECONDS = 0.5
_FIRST = 3.0
"""Until its first step is done it compiles; so many times the limit, as for several ranks."""
_ENDS = 3.0
"""Limits until a step that was told is ended. What waits for data, a disk or a store can still be stopped and saved."""
_TELL_SECONDS = 5.0
"""It may be that nobody reads what is printed."""
_DEBUGGERS = ("bdb.py", "pdb.py", "pydevd.py", "pydevd_frame.py", "code.py", "interactiveshell.py")


class OwnWatch:
    """Looks at a heart twice a second; a context manager.

    Looks are counted, not time: a process that was stopped, or a machine that slept, does not hang. Neither does one in
    a debugger, or one that has not begun to train: its lists of files may be long, and say how far they are.

    Args:
        limit_seconds: without progress, after which it tells where all threads are.
        ends: whether a step without progress for three times as long ends the process with 1; nothing is saved, as
            nobody knows what the step has changed. A step that took longer before makes both times longer.
    """

    def __init__(self, heart: Heart, limit_seconds: float, ends: bool) -> None:
        self._heart = heart
        self._limit = limit_seconds
        self._ends = ends
        self._seen: tuple[object, ...] = ()
        self._in_step = False
        self._looks = self._longest = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hotloop-watch", daemon=True)

    def __enter__(self) -> "OwnWatch":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()

    def look(self) -> HotloopError | str:
        """To be called twice a second: what is to be told, mostly nothing; an error if it is the end."""
        heart = self._heart
        moves = heart.signs_of_life != self._seen or heart.phase == "starting" or heart.is_patient
        if moves and self._in_step:
            self._longest = max(self._longest, self._looks)
        self._in_step = heart.phase == "step"
        self._seen, self._looks = heart.signs_of_life, 0 if moves else self._looks + 1
        limit = max(round(self._limit * (1 if heart.step else _FIRST) / _LOOK_SECONDS), self._longest + 1)
        last = round(_ENDS * limit)
        if self._looks not in (limit, last) or (self._looks == last and not self._may_end) or _is_debugged():
            return ""
        since = format_seconds(self._looks * _LOOK_SECONDS)
        what = f"{self._who} makes no progress for {since}: {heart.phase} after {count(heart.step, 'step')}{self._sent}"
        if self._looks == last:
            fix = (
                'mend what holds it up, and start the same command again; if it takes longer: --set "ranks.timeout=1 h"'
            )
            return HotloopError(what, f"this is where its threads are\n{stacks()}", fix)
        soon = f"; it is ended after {format_seconds(last * _LOOK_SECONDS)}" if self._may_end else ""
        return f"{what}{soon}; this is where its threads are\n{stacks()}"

    @property
    def _may_end(self) -> bool:
        return self._ends and self._in_step

    @property
    def _who(self) -> str:
        world = self._heart.world
        return f"rank {world.rank}" if world.size > 1 else "the training"

    @property
    def _sent(self) -> str:
        last = ""
        with suppress(Exception):  # as in the heartbeat: torch's recorder is not public
            last = last_collective() if self._heart.world.size > 1 else ""
        return f"; last collective: {last}" if last else ""

    def _run(self) -> None:
        while not self._end.wait(_LOOK_SECONDS):
            if not (told := self.look()):
                continue
            is_end = isinstance(told, HotloopError)
            text = f"{'error' if is_end else 'warning'}: {told}\n"
            teller = threading.Thread(target=_write, args=(text,), name="hotloop-watch-tells", daemon=True)
            teller.start()
            teller.join(_TELL_SECONDS)
            if is_end:
                os._exit(1)


def _write(text: str) -> None:
    with suppress(OSError, ValueError):  # who read it has gone, or it is closed
        sys.stderr.write(text)
        sys.stderr.flush()


def stacks() -> str:
    """Of all threads but the one that asks; no file is read for it, as that may be what hangs."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = {number: frame for number, frame in sys._current_frames().items() if number != threading.get_ident()}
    shown = [f"--- {names.get(number, number)}\n{_lines(frame)}" for number, frame in frames.items()]
    return "\n".join(reversed(shown))


def _lines(frame: FrameType | None) -> str:
    lines = []
    while frame:
        lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno}, in {frame.f_code.co_name}')
        frame = frame.f_back
    return "\n".join(reversed(lines))


def _is_debugged() -> bool:
    for frame in sys._current_frames().values():
        own: FrameType | None = frame
        while own:
            if os.path.basename(own.f_code.co_filename) in _DEBUGGERS:
                return True
            own = own.f_back
    return False
