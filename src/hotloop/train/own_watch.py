"""A training that no process of ours looks after: a thread of its own finds that it hangs, shows where, and ends it."""

import os
import sys
import threading
import traceback
from contextlib import suppress
from types import TracebackType

from hotloop.core.errors import HotloopError
from hotloop.core.units import count, format_seconds
from hotloop.train.collectives import last_collective
from hotloop.train.heartbeat import Heart

_LOOK_SECONDS = 0.5
_FIRST = 3.0
"""Until its first step is done it compiles; so many times the limit, as for several ranks."""
_TELL_SECONDS = 5.0
_DEBUGGERS = ("/bdb.py", "/pdb.py", "/pydevd", "/IPython/")


class OwnWatch:
    """Looks at a heart twice a second, and ends the process with 1 where it has made no progress for so long.

    Looks are counted, not time: a process that was stopped, or a machine that slept, does not hang. Neither does one in
    a debugger, or one that has not begun to train: its lists of files may be long, and say how far they are.

    A context manager.
    """

    def __init__(self, heart: Heart, limit_seconds: float) -> None:
        self._heart = heart
        self._limit = limit_seconds
        self._seen: tuple[int, int, int, str] | None = None
        self._looks = 0
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

    def hung(self) -> HotloopError | None:
        """To be asked twice a second."""
        heart = self._heart
        seen = (heart.beats, heart.signs, heart.step, heart.phase)
        moves = seen != self._seen or heart.phase == "starting" or heart.is_patient
        self._seen, self._looks = seen, 0 if moves else self._looks + 1
        limit = self._limit if heart.step else self._limit * _FIRST
        if self._looks * _LOOK_SECONDS < limit:
            return None
        stacks = _stacks()
        if any(word in stacks for word in _DEBUGGERS):
            self._looks = 0
            return None
        last = ""
        with suppress(Exception):  # as in the heartbeat: torch's recorder is not public
            last = last_collective() if heart.world.size > 1 else ""
        who = f"rank {heart.world.rank}" if heart.world.size > 1 else "the training"
        sent = f"; last collective: {last}" if last else ""
        what = f"{who} makes no progress for {format_seconds(limit)}: {heart.phase} after {count(heart.step, 'step')}"
        fix = 'mend what holds it up, and start the same command again; if it takes longer: --set "ranks.timeout=1 h"'
        return HotloopError(f"{what}{sent}", f"this is where its threads are\n{stacks}", fix)

    def _run(self) -> None:
        while not self._end.wait(_LOOK_SECONDS):
            if error := self.hung():
                # What hangs may be that nobody reads what it prints.
                threading.Timer(_TELL_SECONDS, os._exit, (1,)).start()
                sys.stderr.write(f"error: {error}\n")
                sys.stderr.flush()
                os._exit(1)


def _stacks() -> str:
    """Of all threads but this one."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = {number: frame for number, frame in sys._current_frames().items() if number != threading.get_ident()}
    shown = [f"--- {names.get(number, number)}\n{''.join(traceback.format_stack(frames[number]))}" for number in frames]
    return "".join(reversed(shown)).rstrip()
