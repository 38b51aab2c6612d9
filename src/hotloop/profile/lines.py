"""Which lines of a script are at work, by looking now and then."""

import sys
import sysconfig
import threading
from collections import Counter
from pathlib import Path
from types import FrameType

_EVERY_SECONDS = 0.01

_PACKAGE = str(Path(__file__).parents[1])
_LIBRARIES = tuple({*sysconfig.get_paths().values(), _PACKAGE, "<frozen"} - {sysconfig.get_paths()["data"]})


def script_line(frame: FrameType | None) -> str:
    """The innermost line that is the user's own, as "FILE:LINE"; empty if there is none."""
    while frame:
        name = frame.f_code.co_filename
        if not name.startswith(_LIBRARIES) and not name.startswith("<"):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


class Lines:
    """Looks at a thread every 10 ms from another one; about 20 us each."""

    def __init__(self, thread: int) -> None:
        self.counts: Counter[str] = Counter()
        self._thread = thread
        self._ended = threading.Event()
        self._looking = threading.Thread(target=self._look, name="hotloop-lines", daemon=True)

    def start(self) -> None:
        self._looking.start()

    def stop(self) -> dict[str, int]:
        """End, and say how often each line was seen."""
        self._ended.set()
        self._looking.join()
        return dict(self.counts.most_common(20))

    def _look(self) -> None:
        while not self._ended.wait(_EVERY_SECONDS):
            frame = sys._current_frames().get(self._thread)
            if line := script_line(frame):
                self.counts[line] += 1
