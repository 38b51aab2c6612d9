"""What the kernel tells of this process."""

import os
import resource
import time
from pathlib import Path

_MOST_BYTES = 1 << 16
"""Of what the kernel says of a process."""


def most_resident_bytes() -> int:
    """The most that this process had resident. getrusage's figure begins with what the parent had when it forked."""
    status = Path("/proc/self/status").read_bytes()
    if b"\nVmHWM:" not in status:  # a kernel that does not tell, such as gVisor's
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(status.split(b"\nVmHWM:")[1].split()[0]) * 1024


def started(pid: int, proc: Path = Path("/proc")) -> int | None:
    """When a process began, in ticks since the machine did; None if there is none, or a dead one not yet waited for."""
    try:
        with open(f"{proc}/{pid}/stat", "rb", buffering=0) as file:
            state, *others = file.read(_MOST_BYTES).rpartition(b")")[2].split()
    except (OSError, ValueError):
        return None
    return None if state in b"ZX" else int(others[18])


def parent_started() -> float:
    """When the process that has started this one was started itself, in seconds since 1970."""
    since_boot = (started(os.getppid()) or 0) / os.sysconf("SC_CLK_TCK")
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot
