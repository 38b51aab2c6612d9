"""What `hotloop profile` has last said of a job."""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from glob import escape
from pathlib import Path

from hotloop.core.live import Live, printable
from hotloop.core.units import format_seconds
from hotloop.monitor.web.reading import read_text

_MOST = 256
"""Profiles that are looked at."""


def last_profile(live: Live, proc: Path = Path("/proc"), now: Callable[[], float] = time.time) -> str:
    """The sentence of the newest profile, how old it is and where it lies; "" if there is none.

    Looked for in the run's directory, and in the folder `profiles` beside which the process was started. Of a job on
    another machine nothing is known.
    """
    newest = max(_profiles(live, proc), default=None)
    if newest is None:
        return ""
    written, file = newest
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        sentence = printable(str(json.loads(read_text(file))["sentence"]))
        return f"{sentence} ({format_seconds(max(0.0, now() - written))} ago, {file.parent})"
    return ""


def _profiles(live: Live, proc: Path) -> Iterator[tuple[float, Path]]:
    if not live.pid:
        return
    folders = [(Path(live.run), "profile.json"), (Path(live.run), "*/profile.json")] if live.run else []
    with suppress(OSError):
        started_in = Path(os.readlink(proc / str(live.pid) / "cwd"))
        folders.append((started_in / "profiles", f"{escape(live.job)}-*/profile.json"))
    for folder, pattern in folders:
        for file, _ in zip(folder.glob(pattern), range(_MOST), strict=False):
            with suppress(OSError):
                yield file.stat().st_mtime, file
