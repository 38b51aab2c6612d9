"""Which lines of a script are at work, by looking now and then."""

import sys
import sysconfig
import threading
import time
from collections import Counter
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

EVERY_SECONDS = 0.01
_MOST = 0.01
"""Of a processor, for looking: among hundreds of frames, a compiler's say, a look takes a third of a millisecond."""
# A thread that runs Python lets others look after CPython's 5 ms, or where it calls what works without its lock: of 8
# ms of Python one look of three saw something, and the others the first call of torch after them.
_SWITCH_SECONDS = 0.0002
_TORCH, _MODULE, _LOADER = "/torch/", "/torch/nn/modules/module.py", "/torch/utils/data/dataloader.py"

_PACKAGE = str(Path(__file__).parents[1])
_PACKAGES = ("/site-packages/", "/dist-packages/")
_LIBRARIES = tuple({*sysconfig.get_paths().values(), _PACKAGE, "<frozen"} - {sysconfig.get_paths()["data"]})


def script_line(frame: FrameType | None) -> str:
    """The innermost line that is the user's own, as "FILE:LINE"; empty if there is none."""
    while frame:
        name = frame.f_code.co_filename
        if _is_own(name):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


class Places:
    """`script_line` for calls that come from the same places again and again: 0.2 us instead of 1 us.

    A line of the user's own is remembered by its place in the code; what comes through a library is looked up anew.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[CodeType, int], str] = {}

    def of(self, frame: FrameType) -> str:
        """The innermost line that is the user's own."""
        key = frame.f_code, frame.f_lasti
        known = self._known.get(key)
        if known is None:
            known = script_line(frame)
            if _is_own(frame.f_code.co_filename):
                self._known[key] = known
        return known


def _is_called_by(file: str, frame: FrameType | None) -> bool:
    """Whether what runs was called by something in this file of torch's."""
    while frame and not frame.f_code.co_filename.endswith(file):
        frame = frame.f_back
    return frame is not None


@cache
def _is_own(name: str) -> bool:
    """Whether a file is the user's own."""
    return not name.startswith(("<", *_LIBRARIES)) and not any(part in name for part in _PACKAGES)


class Lines:
    """Looks at a thread now and then from another one, and notes its line unless it is inside of torch's Python or
    loads samples. Where a look takes more than a hundredth of the time between two, it looks less often.

    A context that can be entered again. Meanwhile threads change places after 0.2 ms instead of Python's 5 ms, if one
    waits.

    Args:
        thread: its number.
        every: seconds between two looks.

    Attributes:
        seconds: of a processor that looking has taken.
        looks: how often it has.
        in_models: of those that saw a line, while a module was being called.
    """

    def __init__(self, thread: int, every: float = EVERY_SECONDS) -> None:
        self.seconds = 0.0
        self.looks = self.in_models = 0
        self._counts: Counter[str] = Counter()
        self._thread = thread
        self._every = every
        self._ended = threading.Event()
        self._looking: threading.Thread
        self._interval: float

    def __enter__(self) -> "Lines":
        self._ended.clear()
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(min(self._interval, _SWITCH_SECONDS))
        self._looking = threading.Thread(target=self._look, name="hotloop-lines", daemon=True)
        self._looking.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._looking.join()
        sys.setswitchinterval(self._interval)

    def most_common(self) -> dict[str, int]:
        """How often lines were seen, the most often seen first."""
        return dict(self._counts.most_common(20))

    def _look(self) -> None:
        pause, used = self._every, 0.0
        while not self._ended.wait(pause):
            frame = sys._current_frames().get(self._thread)
            self.looks += 1
            own = frame and _TORCH not in frame.f_code.co_filename and script_line(frame)
            if own and not _is_called_by(_LOADER, frame):  # a data set without workers: that is input
                self._counts[own] += 1
                self.in_models += _is_called_by(_MODULE, frame)
            before, used = used, time.thread_time()
            pause = max(self._every, (used - before) / _MOST)
        self.seconds += time.thread_time()
