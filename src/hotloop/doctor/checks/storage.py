"""Folders: space, kind, speed."""

from collections.abc import Iterator

from hotloop.core.units import format_bytes
from hotloop.doctor.finding import Check, Seen
from hotloop.doctor.record import MachineRecord

_FULL_BYTES, _NEARLY_BYTES = 1 << 30, 10 << 30
_FULL_SHARE, _NEARLY_SHARE = 0.05, 0.03
_SLOW = 200e6
"""Bytes a second: 1,500 photographs, less than one GPU takes."""


def folders(record: MachineRecord) -> Iterator[Seen]:
    """Space, and what a folder lies on."""
    told: set[tuple[str, int]] = set()
    for folder in record.folders:
        name = f"{folder.path} ({folder.role})"
        if folder.error:
            yield Seen("folder-unreadable", f"{name}: {folder.error}")
            continue
        free = f"{format_bytes(folder.free_bytes)} of {format_bytes(folder.total_bytes)} are free"
        once = (folder.file_system, folder.device)
        share = folder.free_bytes / folder.total_bytes if folder.total_bytes else 0.0
        if once not in told and folder.role != "data":
            if folder.free_bytes < _FULL_BYTES and share < _FULL_SHARE:
                yield Seen("disk-full", f"{name}: {free}")
            elif folder.free_bytes < min(_NEARLY_BYTES, _NEARLY_SHARE * folder.total_bytes):
                yield Seen("disk-nearly-full", f"{name}: {free}")
            if folder.total_files and (folder.free_files or 0) < 0.01 * folder.total_files:
                yield Seen("no-inodes", f"{name}: {folder.free_files} of {folder.total_files} files are left")
            told.add(once)
        if not folder.writable and folder.role != "data":
            yield Seen("folder-not-writable", name)


def data(record: MachineRecord) -> Iterator[Seen]:
    """Where a training reads from."""
    for folder in record.folders:
        if folder.role != "data" or folder.error:
            continue
        rate = folder.read_bytes_per_second
        if rate is not None and rate < _SLOW:
            yield Seen("data-slow", f"{folder.path}: {rate / 1e6:.0f} MB/s ({folder.kind or folder.file_system})")
        elif folder.kind == "hdd" and not record.system.virtualization:  # virtual disks say that they turn
            yield Seen("data-on-hdd", f"{folder.path} lies on a disk that turns")
        if folder.kind == "network":
            yield Seen("data-on-network", f"{folder.path} is {folder.file_system}")


CHECKS: tuple[Check, ...] = (folders, data)
