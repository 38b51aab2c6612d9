"""What checkpoints there are, and whether they are whole."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hotloop.core.errors import CheckpointError, InputError
from hotloop.train.checkpoint.checkpointer import all_checkpoints, refuse_set_aside, verify_checkpoint
from hotloop.train.checkpoint.files import MANIFEST, Position, position_of, read_manifest


@dataclass(frozen=True)
class Stored:
    """A checkpoint.

    Attributes:
        path: on the disk; the address of a copy in object storage.
        position: epoch and step, by its name.
        size_bytes: of all its files.
        saved: when, in seconds since 1970.
        damage: why it cannot be loaded; empty if it can; None if nobody has looked.
    """

    path: Path | str
    position: Position
    size_bytes: int
    saved: float
    damage: str | None = None


def stored_checkpoints(path: Path, verify: bool = False) -> Iterator[Stored]:
    """Those of a run, of a folder of them, or the one that this is; oldest first.

    Args:
        verify: read each whole, and compare it with its hash: about 1 s a GB.

    Raises:
        InputError: there is none.
        CheckpointError: the folder cannot be read, or all are set aside as damaged or abandoned.
    """
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    if (path / MANIFEST).is_file():  # whatever its folder is called
        yield _stored(path, position_of(path.name) or _told_position(path), verify)
        return
    found = [(position, one) for position, one in all_checkpoints(path.parent) if one == path]
    found = found or list(reversed(all_checkpoints(folder)))
    if not found:
        refuse_set_aside(folder)
        cause = "it is neither a checkpoint, nor a folder of them, nor a run"
        raise InputError(f"no checkpoint at {path}", cause, "hotloop checkpoint list runs/NAME")
    for position, one in found:
        if there := _there(one, position, verify):
            yield there


def _there(path: Path, position: Position, verify: bool) -> Stored | None:
    """None for one that a training has meanwhile removed, as it keeps the newest ones."""
    try:
        found = _stored(path, position, verify)
    except FileNotFoundError:
        found = None
    return found if path.is_dir() else None


def _told_position(path: Path) -> Position:
    try:
        manifest = read_manifest((path / MANIFEST).read_bytes())
        return int(manifest["epoch"]), int(manifest["step"])
    except (LookupError, TypeError, ValueError):  # it is told as damaged
        return 0, 0


def _stored(path: Path, position: Position, verify: bool) -> Stored:
    states = [file.stat() for file in path.iterdir() if file.is_file()]
    damage = None
    if verify:
        try:
            verify_checkpoint(path)
            damage = ""
        except CheckpointError as error:
            damage = error.cause
    saved = max((state.st_mtime for state in states), default=path.stat().st_mtime)
    return Stored(path, position, sum(state.st_size for state in states), saved, damage)
