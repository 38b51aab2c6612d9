"""Checkpoints as folders and files: their names, and how several processes make one that is whole or not there.

The process that writes them beside a training imports this, and no torch.
"""

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotloop.core.files import finish_directory, recover, write_atomic
from hotloop.core.units import count

Position = tuple[int, int]
"""Epoch and step. The newest checkpoint is the one with the highest."""

FORMAT = 2
STATE, MANIFEST = "state.pt", "manifest.json"
_NAME = re.compile(r"epoch-(\d+)-step-(\d+)")
_SHARE, _FAILURE = ".share-{:05d}.json", ".failed-{:05d}"
_PIECE_BYTES = 1 << 24
_PROBE = ".probe"
_LOOK_SECONDS, _TOUCH_SECONDS = 0.02, 1.0
_DIGITS_SHOWN = 8


@dataclass(frozen=True)
class Share:
    """What one process has of a checkpoint.

    Attributes:
        number: of the process, from 0.
        of: so many processes that have a share each.
    """

    number: int = 0
    of: int = 1


@dataclass(frozen=True)
class Plan:
    """How the shares of a checkpoint become one; the first process does that.

    Attributes:
        path: of the checkpoint.
        manifest: what it says, but for the files.
        keep: how many of the newest stay.
        limit_seconds: for the others to write their shares.
    """

    path: str
    manifest: dict[str, Any]
    keep: int
    limit_seconds: float


class ShareFailed(OSError):
    """Another process could not write its share."""


def checkpoint_name(position: Position) -> str:
    """Of its folder."""
    return f"epoch-{position[0]:04d}-step-{position[1]:08d}"


def position_of(name: str) -> Position | None:
    """That a folder's name tells; None if it is no checkpoint's."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def part_name(share: Share) -> str:
    """Of the file with the tensors of a share."""
    return f"part-{share.number + 1:05d}-of-{share.of:05d}.safetensors"


def all_checkpoints(folder: Path) -> list[tuple[Position, Path]]:
    """The checkpoints in a folder with their positions by name, newest first, whole or not.

    Raises:
        OSError: the folder cannot be read.
    """
    try:
        named = [(found, path) for path in folder.iterdir() if (found := position_of(path.name)) and path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(named, reverse=True)


def write_checkpoint(
    temporary: Path, share: Share, files: Mapping[str, Iterable[memoryview]], plan: Plan | None
) -> None:  # fmt: skip
    """Write a share, and with a plan, the checkpoint as soon as the others have written theirs.

    Args:
        files: their content, by name, in pieces.

    Raises:
        OSError: it was not possible; with a plan, nothing of the checkpoint is left.
    """
    try:
        _write_share(temporary, share, files)
        if plan:
            _publish(temporary, plan, share.of)
    except BaseException:
        if plan:
            recover(Path(plan.path))
        raise


def _write_share(temporary: Path, share: Share, files: Mapping[str, Iterable[memoryview]]) -> None:
    """That a share is whole is the last thing to be seen; that it cannot be written is seen by who waits for it."""
    begun = temporary.exists()
    try:
        described = {name: _write(temporary / name, content) for name, content in files.items()}
        write_atomic(share_file(temporary, share.number), json.dumps(described))
    except OSError as error:
        if share.number and begun and not temporary.exists():
            return  # the first process has given up, and tells why: what this one meets is no cause
        for name in files:  # a full disk has no room for the next line either
            (temporary / name).unlink(missing_ok=True)
        if temporary.exists() and share.of > 1:
            failure = {"errno": error.errno, "text": error.strerror or str(error)}
            (temporary / _FAILURE.format(share.number)).write_text(json.dumps(failure))
        raise


def share_file(temporary: Path, number: int) -> Path:
    """There once a process's share is whole, until the checkpoint is."""
    return temporary / _SHARE.format(number)


def is_incomplete(temporary: Path, of: int) -> bool:
    """Whether a share of another process than the first is yet to come."""
    others = range(1, of)
    return not all(share_file(temporary, one).exists() or (temporary / _FAILURE.format(one)).exists() for one in others)


def _write(file: Path, content: Iterable[memoryview]) -> dict[str, Any]:
    """Write a file in one pass; its size and SHA-256. Writing and hashing take as long as each other: side by side."""
    digest, size = hashlib.sha256(), 0
    with file.open("wb", buffering=0) as opened, ThreadPoolExecutor(1, "hotloop-hashing") as hashing:
        for block in content:
            flat = block.cast("B")
            for start in range(0, len(flat), _PIECE_BYTES):
                piece = flat[start : start + _PIECE_BYTES]
                hashed = hashing.submit(digest.update, piece)
                size += len(piece)
                while len(piece):
                    piece = piece[opened.write(piece) :]
                hashed.result()
        os.fsync(opened.fileno())
    return {"sha256": digest.hexdigest(), "bytes": size}


def _publish(temporary: Path, plan: Plan, of: int) -> None:
    path, files = Path(plan.path), dict[str, Any]()
    for number in range(of):
        files |= _awaited(temporary, number, plan.limit_seconds)
    write_atomic(temporary / MANIFEST, manifest_text({"format": FORMAT, **plan.manifest, "files": files}))
    finish_directory(path)
    for left in path.glob(".share-*"):  # not before: who goes on for a killed writer needs them
        left.unlink()
    for _, old in all_checkpoints(path.parent)[plan.keep :]:
        if old != path:  # a loop that went back saves what is not the newest
            shutil.rmtree(old, ignore_errors=True)  # a file that is still read may stay for a while


def _awaited(temporary: Path, number: int, limit_seconds: float) -> dict[str, Any]:
    """The files of a share, once they are whole. Ranks may be on several hosts: what they share is the folder."""
    file, failure = share_file(temporary, number), temporary / _FAILURE.format(number)
    until = time.monotonic() + limit_seconds
    touched = time.monotonic()
    while not file.exists():
        if time.monotonic() - touched > _TOUCH_SECONDS:
            # What an NFS client has once not found it does not look up again for up to 30 s (acdirmin), unless it has
            # changed that folder itself: https://man7.org/linux/man-pages/man5/nfs.5.html
            (temporary / _PROBE).touch()
            (temporary / _PROBE).unlink()
            touched = time.monotonic()
        if failure.exists() and (text := failure.read_text()):
            told = json.loads(text)
            raise ShareFailed(told["errno"], f"{told['text']}, on rank {number}")
        if time.monotonic() > until:
            raise TimeoutError(None, f"rank {number} has not written its part for {limit_seconds:.0f} s")
        time.sleep(_LOOK_SECONDS)
    described: dict[str, Any] = json.loads(file.read_text())
    return described


def manifest_text(content: Mapping[str, Any]) -> str:
    """Of a manifest that says this, and the SHA-256 of it."""
    return json.dumps({**content, "sha256": _digest(content)}) + "\n"


def read_manifest(text: bytes) -> dict[str, Any]:
    """What a manifest says.

    Raises:
        ValueError: it is no manifest, or not as it was written.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise ValueError(f"{MANIFEST} is no object of JSON")
    if content.pop("sha256", None) != _digest(content):
        raise ValueError(f"{MANIFEST} is not as it was written: its SHA-256 is another, or gone")
    return content


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def describe(file: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file."""
    with file.open("rb") as opened:
        return {"sha256": hashlib.file_digest(opened, "sha256").hexdigest(), "bytes": file.stat().st_size}


def difference(name: str, found: Mapping[str, Any], written: Any) -> str:
    """What is other about a file than when it was written, in words.

    Args:
        found: what `describe` says of it.
        written: what the manifest says of it, which may have been changed by hand.
    """
    match written:
        case {"sha256": str(digest), "bytes": int(size), **more} if not more:
            if size != found["bytes"]:
                return f"{name} has {count(found['bytes'], 'byte')}, {size:,} were written"
            here, then = (one[:_DIGITS_SHOWN] for one in (found["sha256"], digest))
            return f"{name} is not what was written (SHA-256 {here}..., {then}... was written)"
        case _:
            return f"{MANIFEST} does not say which size and SHA-256 {name} has"
