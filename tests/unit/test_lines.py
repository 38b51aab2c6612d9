"""Which lines of a script are at work."""

import hashlib
import sys
import threading
import time
from pathlib import Path

from hotloop.profile.lines import Lines

DATA = bytes(4096)


def rounds(seconds: float) -> int:
    """Python of some milliseconds, then a call that gives the interpreter's lock away, as torch's do."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        sum(n * n for n in range(40_000))
        hashlib.sha256(DATA)
    return 0


def test_pythons_own_lines_are_seen_and_not_the_call_after_them() -> None:
    before = sys.getswitchinterval()
    with Lines(threading.get_ident()) as lines:
        rounds(1.5)
    assert sys.getswitchinterval() == before
    seen = lines.most_common()
    text = Path(__file__).read_text().splitlines()
    line = next(number for number, one in enumerate(text, 1) if "range(40_000)" in one)
    assert seen[f"{__file__}:{line}"] > 0.7 * sum(seen.values())
