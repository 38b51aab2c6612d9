"""What the kernel tells of this process."""

import os
import resource
import time
from pathlib import Path


def most_resident_bytes() -> int:
    """The most that this process had resident. getrusage's figure begins with what the parent had when it forked."""
    status = Path("/proc/self/status").read_bytes()
    if b"\nVmHWM:" not in status:  # a kernel that does not tell, such as gVisor's
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(status.split(b"\nVmHWM:")[1].split()[0]) * 1024


def parent_started() -> float:
    """When the process that has started this one was started itself, in seconds since 1970."""
    fields = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
    since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot
