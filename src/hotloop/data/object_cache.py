"""What is kept of object storage on the local disk: bounded, checked, and let go of when others need the room."""

import fcntl
import os
import shutil
import zlib
from contextlib import suppress
from pathlib import Path

from hotloop.core.files import user_cache

_SPARED_BYTES = 8 * 2**30
"""Of the disk, that stay free: for checkpoints, most of all."""
_CHECKSUM_BYTES = 4
_LOCK = "lock"

_IN_USE: dict[Path, tuple[int, float]] = {}
"""The folders of this process: the lock that tells other processes of it, and the bytes that it may hold."""


def open_cache(key: str, total: int, most_bytes: float) -> tuple[str, float]:
    """A folder for objects of so many bytes in all, and the share of them that it may hold, 0 to 1.

    What other data have left goes, the least recently used first, where all are more than `most_bytes` for each data
    set of this process; folders that a process uses stay.

    Args:
        key: of the data, as file name.

    Returns:
        an empty name where nothing can be kept.
    """
    home = user_cache()
    if not home or not most_bytes or not total:
        return "", 0.0
    folder = home / "objects" / key
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)
        _let_go(folder)
        if folder not in _IN_USE:
            _IN_USE[folder] = _locked(folder), 0.0
        promised = {each: most for each, (_, most) in _IN_USE.items() if each.parent == folder.parent}
        promised.pop(folder, None)
        _make_room(folder, most_bytes * (1 + len(promised)) - min(most_bytes, total) - sum(promised.values()))
        there = _folder_bytes(folder)
        coming = sum(max(0.0, most - _folder_bytes(each)) for each, most in promised.items())
        room = min(most_bytes, total, max(0.0, there + _free(folder) - coming))
        _IN_USE[folder] = _IN_USE.pop(folder)[0], room  # the newest last
    except OSError:  # no disk to write to
        return "", 0.0
    return str(folder), room / total


def read_kept(file: Path) -> bytes | None:
    """What was kept; None if it is not there or damaged."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    content, checksum = content[:-_CHECKSUM_BYTES], content[-_CHECKSUM_BYTES:]
    return content if zlib.crc32(content).to_bytes(_CHECKSUM_BYTES) == checksum else None


def keep(file: Path, content: bytes) -> None:
    """Write a file, if the disk has the room."""
    temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if _free(file.parent) > len(content):
            temporary.write_bytes(content + zlib.crc32(content).to_bytes(_CHECKSUM_BYTES))
            temporary.replace(file)
    except OSError:  # the disk is full, or it was taken away: the store has it still
        temporary.unlink(missing_ok=True)


def _free(folder: Path) -> float:
    """Bytes that may be written before what is spared begins."""
    return shutil.disk_usage(folder).free - _SPARED_BYTES


def _locked(folder: Path) -> int:
    """A lock that others share, and that goes with this process."""
    descriptor = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def _let_go(wanted: Path) -> None:
    """Earlier data of this process, of which there is one training and one validation at most."""
    for folder in [each for each in _IN_USE if each != wanted][:-1]:
        os.close(_IN_USE.pop(folder)[0])


def _make_room(folder: Path, for_others: float) -> None:
    others = [other for other in folder.parent.iterdir() if other not in (folder, *_IN_USE)]
    used = {other: (_used_at(other), _folder_bytes(other)) for other in others}
    for other in sorted(others, key=lambda other: used[other][0]):
        if sum(size for _, size in used.values()) <= for_others:
            return
        if _is_free(other):
            shutil.rmtree(other, ignore_errors=True)
            del used[other]


def _used_at(folder: Path) -> float:
    with suppress(OSError):  # another process has just removed it
        return folder.stat().st_mtime
    return 0.0


def _is_free(folder: Path) -> bool:
    """Whether no process uses it."""
    try:
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _folder_bytes(folder: Path) -> int:
    """On the disk, where small files take whole blocks."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # another process has just removed it
                total += os.stat(os.path.join(parent, name)).st_blocks * 512
    return total
