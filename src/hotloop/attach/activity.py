"""How busy processes and threads were, by the kernel's own accounts."""

import os
import resource
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

CROWDED = 0.2
"""Share of the time, wanted by threads, in which they got no processor, from which on figures are doubtful."""
_TICKS = os.sysconf("SC_CLK_TCK")


class Activity:
    """What some processes, and this one's threads, do from now on."""

    def __init__(self, workers: Sequence[int]) -> None:
        self._started = time.perf_counter()
        self._busy = _ended_seconds() + sum(map(_processor_seconds, workers))
        self._held_up = {worker: _schedstat(worker, 1) for worker in workers}
        self._late = _schedstat("self", 1, str(threading.get_native_id()))
        self._queued = _schedstat("self", 1)
        self._ran = _schedstat("self", 0)

    def workers_busy(self, workers: Sequence[int]) -> float:
        """Mean share of the time that a worker was on a processor, or would have been had one been free.

        Args:
            workers: those of now; what others have done by then has been added to the children that have ended.
        """
        if not workers:
            return 0.0
        used = _ended_seconds() + sum(map(_processor_seconds, workers)) - self._busy
        used += sum(_schedstat(worker, 1) - self._held_up.get(worker, 0.0) for worker in workers)
        return used / (time.perf_counter() - self._started) / len(workers)

    def queued(self) -> float:
        """Share of the time in which this process's threads wanted a processor that they had to wait for one."""
        waited, ran = _schedstat("self", 1) - self._queued, _schedstat("self", 0) - self._ran
        return waited / (waited + ran) if waited + ran > 0 else 0.0

    def late(self) -> float:
        """Share of the time in which the thread that asks, and has asked for this, waited for a processor."""
        waited = _schedstat("self", 1, str(threading.get_native_id())) - self._late
        return waited / (time.perf_counter() - self._started)


def _ended_seconds() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return children.ru_utime + children.ru_stime


def _processor_seconds(process: int) -> float:
    with suppress(OSError, IndexError, ValueError):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS
    return 0.0


def _schedstat(process: int | str, number: int, threads: str = "*") -> float:
    """Seconds that a process's threads have run (0) or waited for a processor (1):
    https://docs.kernel.org/scheduler/sched-stats.html
    """
    total = 0
    with suppress(OSError):
        for thread in Path(f"/proc/{process}/task").glob(threads):
            with suppress(OSError, IndexError, ValueError):
                total += int((thread / "schedstat").read_text().split()[number])
    return total / 1e9
