"""What a container, a control group and the shell leave to a training."""

from collections.abc import Iterator

from hotloop.core.units import format_bytes
from hotloop.doctor.finding import Check, Seen
from hotloop.doctor.record import MachineRecord

_SHM_BYTES = 1 << 30
_MEMLOCK_BYTES = 1 << 30
_OPEN_FILES = 1024
_OPEN_FILES_HARD = 4096
_PIDS = 1024
_LEAST_AVAILABLE = 0.05


def shm(record: MachineRecord) -> Iterator[Seen]:
    """Where workers of a DataLoader put their batches."""
    limits = record.limits
    if limits.shm_bytes is not None and limits.shm_bytes < _SHM_BYTES:
        yield Seen("shm-small", f"{format_bytes(limits.shm_bytes)} of shared memory (/dev/shm)")
    elif limits.shm_bytes and limits.shm_free_bytes is not None and limits.shm_free_bytes < _SHM_BYTES / 2:
        yield Seen("shm-full", f"{format_bytes(limits.shm_free_bytes)} of {format_bytes(limits.shm_bytes)} are free")


def numbers(record: MachineRecord) -> Iterator[Seen]:
    """Limits of this process."""
    limits = record.limits
    soft, hard = limits.open_files, limits.open_files_hard
    if (soft and soft < _OPEN_FILES) or (hard and hard < _OPEN_FILES_HARD):
        yield Seen("open-files-low", f"{soft} open files, {hard} at most")
    if (
        any(port.state == "active" and port.kind == "InfiniBand" for port in record.rdma)
        and limits.memlock_bytes is not None
        and limits.memlock_bytes < _MEMLOCK_BYTES
    ):
        yield Seen("memlock-small", f"{format_bytes(limits.memlock_bytes)} of memory may be locked; RDMA needs more")
    fewest = min((one for one in (limits.processes, limits.pids) if one), default=None)
    if fewest and fewest < _PIDS:
        yield Seen("processes-low", f"{fewest} processes and threads at most")


def processors(record: MachineRecord) -> Iterator[Seen]:
    """A quota that tools do not see."""
    own = record.processors
    threads = record.environment.get("OMP_NUM_THREADS", "")
    if own.usable < len(own.allowed or range(own.visible)) / 2 and not threads:
        seen = len(own.allowed) or own.visible
        fix = f"export OMP_NUM_THREADS={max(1, int(own.usable))}"
        yield Seen("cpu-quota", f"tools see {seen} processors, the control group gives {own.usable:g}", fix)
    if record.gpus and own.usable < 2 * len(record.gpus):
        yield Seen("few-processors", f"{own.usable:g} processors for {len(record.gpus)} GPUs")
    if own.governor == "powersave" and not record.system.virtualization:
        yield Seen("cpu-governor", "frequency governor powersave")


def memory(record: MachineRecord) -> Iterator[Seen]:
    """Host memory."""
    own = record.memory
    if own.oom_kills:
        yield Seen("oom-kills", f"the kernel killed {own.oom_kills} processes of this control group for memory")
    if own.limit_bytes and own.limit_bytes < own.total_bytes / 2:
        of = f"{format_bytes(own.limit_bytes)} of {format_bytes(own.total_bytes)}"
        yield Seen("memory-limit", f"the control group gives {of}, which tools show as theirs")
    most = own.limit_bytes or own.total_bytes
    if own.available_bytes and own.available_bytes < _LEAST_AVAILABLE * most:
        yield Seen("memory-short", f"{format_bytes(own.available_bytes)} of {format_bytes(most)} are left")


def clock(record: MachineRecord) -> Iterator[Seen]:
    """Time and locale."""
    system = record.system
    if system.clock_synchronised is False and not system.virtualization and not system.container:
        yield Seen("clock-unsynchronised", f"the kernel's clock is not synchronised; it says {system.time}")
    if system.time and system.time < "2026":
        yield Seen("clock-wrong", f"the clock says {system.time}")
    if system.encoding not in ("utf-8", "utf8"):
        yield Seen("locale-not-utf8", f"text is {system.encoding} here")


CHECKS: tuple[Check, ...] = (shm, numbers, processors, memory, clock)
