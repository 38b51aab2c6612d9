"""Other programs of a shared host: processors that are taken at random."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

_PROGRAM = """
import os, random, sys, time
draw = random.Random(int(sys.argv[1]))
processors = sorted(os.sched_getaffinity(0))
while True:
    os.sched_setaffinity(0, {draw.choice(processors)})
    until = time.monotonic() + draw.uniform(0.02, 0.2)
    while time.monotonic() < until:
        pass
    time.sleep(draw.uniform(0.0, 0.1))
"""


@contextmanager
def neighbours() -> Iterator[None]:
    """One for each four processors, each at work on one of them for 20 to 200 ms at a time, 0.7 of the time."""
    with ExitStack() as stack:
        for number in range(max(1, len(os.sched_getaffinity(0)) // 4)):
            program = stack.enter_context(subprocess.Popen([sys.executable, "-c", _PROGRAM, str(number)]))
            stack.callback(program.kill)
        yield
