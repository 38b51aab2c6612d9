"""One folder: what it lies on, what is free there, and how fast it is read."""

import errno
import mmap
import os
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from hotloop.doctor.readers.text import text

_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "fuse.sshfs", "9p", "fuse.gcsfuse",
            "fuse.s3fs", "fuse.mount-s3", "glusterfs", "wekafs", "afs"}  # fmt: skip
_MEMORY = {"tmpfs", "ramfs"}
_BLOCK = 4 << 20
_LEAST_BYTES = 64 << 20
_READERS = 8


def read(path: str, role: str, seconds: str = "0") -> dict[str, Any]:
    """A `Folder`; its rate if `seconds` is more than 0."""
    found: dict[str, Any] = {"path": path, "role": role}
    try:
        os.scandir(path).close()
        usage = os.statvfs(path)
    except OSError as error:
        return {**found, "error": error.strerror or str(error)}
    mount = _mount(Path(path).resolve())
    found |= {
        "file_system": mount[1],
        "kind": _kind(mount, os.stat(path).st_dev),
        "device": os.stat(path).st_dev,
        "total_bytes": usage.f_blocks * usage.f_frsize,
        "free_bytes": usage.f_bavail * usage.f_frsize,
        "free_files": usage.f_favail if usage.f_files else None,
        "total_files": usage.f_files or None,
        "writable": _writable(path) if role != "data" else os.access(path, os.W_OK),
    }
    if float(seconds):
        found["read_bytes_per_second"] = _rate(Path(path), float(seconds))
    return found


def _mount(path: Path) -> tuple[str, str]:
    """Device and kind of file system of the mount that holds a path."""
    found, length = ("", ""), -1
    for line in text("/proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        point = before.split()[4].replace("\\040", " ")
        if path.is_relative_to(point) and len(point) >= length:
            kind, device = after.split()[:2]
            found, length = (device, kind), len(point)
    return found


def _kind(mount: tuple[str, str], device: int) -> str:
    if mount[1] in _NETWORK:
        return "network"
    if mount[1] in _MEMORY:
        return "memory"
    if mount[1] == "overlay":
        return "overlay"
    block = Path("/sys/dev/block", f"{os.major(device)}:{os.minor(device)}").resolve()
    disk = block if (block / "queue").exists() else block.parent
    if "nvme" in disk.name:
        return "nvme"
    rotates = text(disk / "queue/rotational")
    return {"0": "ssd", "1": "hdd"}.get(rotates, "") if not disk.name.startswith(("vd", "xvd")) else "ssd"


def _writable(path: str) -> bool:
    try:
        with tempfile.TemporaryFile(dir=path):
            return True
    except OSError:
        return False


def _rate(folder: Path, seconds: float) -> float | None:
    """Bytes a second of large reads beside the page cache; None where too little lies there to tell."""
    started = time.monotonic()
    until = started + seconds
    files, lock = _files(folder), threading.Lock()

    def read_on() -> int:
        done = 0
        while time.monotonic() < until:
            with lock:
                file = next(files, None)
            if file is None:
                break
            done += _read_direct(file, until)
        return done

    with ThreadPoolExecutor(_READERS) as pool:  # as many as a loader has: one alone measures the disk's latency
        done = sum(one.result() for one in [pool.submit(read_on) for _ in range(_READERS)])
    return done / (time.monotonic() - started) if done >= _LEAST_BYTES else None


def _files(folder: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            with suppress(OSError):
                if stat.S_ISREG(path.lstat().st_mode):
                    yield path


def _read_direct(file: Path, until: float) -> int:
    """Bytes read of one file with O_DIRECT, where the file system has it."""
    buffer = mmap.mmap(-1, _BLOCK)
    done = 0
    try:
        try:
            descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        with open(descriptor, "rb", buffering=0) as source:
            while (got := source.readinto(buffer)) and time.monotonic() < until:
                done += got
    except OSError:  # one that cannot be read tells nothing of the rate
        return done
    return done
