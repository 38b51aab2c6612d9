"""Checkpoints that are whole or not there.

A checkpoint is a directory, `epoch-0003-step-00000120/`: `state.pt`, and `manifest.json` with size and SHA-256 of it.
It is written under a temporary name, fsynced and renamed, and verified before it is loaded.
"""

import hashlib
import json
import math
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hotloop.core.errors import CheckpointError, InputError, cannot_write
from hotloop.core.files import new_directory, recover, write_atomic
from hotloop.core.units import Interval

State = dict[str, Any]

Position = tuple[int, int]
"""Epoch and step. The newest checkpoint is the one with the highest."""

_NAME = re.compile(r"epoch-(\d+)-step-(\d+)")


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that was read and verified.

    Attributes:
        position: epoch and step that it was saved at, whatever its folder is called.
    """

    path: Path
    state: State
    position: Position


class _DamagedError(CheckpointError):
    """A checkpoint is not as it was written, and never will be again."""


class Checkpointer:
    """Saves states into a directory and finds the newest good one.

    Args:
        directory: where checkpoints go; it exists, and no other process writes there.
        keep: how many of the newest stay, at least 1.
        warn: told, in a line, of each damaged checkpoint that is passed over.

    Raises:
        InputError: `keep` is less than 1.

    Example:
        ```python
        checkpointer = hotloop.Checkpointer(Path("checkpoints"))
        loaded = checkpointer.latest()
        checkpointer.save({"model": model.state_dict(), "step": step}, step)
        ```
    """

    def __init__(self, directory: Path, keep: int = 2, warn: Callable[[str], None] = lambda _: None) -> None:
        if keep < 1:
            raise InputError(f"keep is {keep}; at least 1 is needed", "the newest checkpoint always stays", "keep=2")
        self._directory = directory
        self._keep = keep
        self._warn = warn

    def save(self, state: State, step: int, epoch: int = 0) -> Path:
        """Write a checkpoint, whole or not at all, then remove the oldest beyond `keep`.

        Args:
            state: what `torch.load(weights_only=True)` reads: tensors, numbers, texts, and lists and dicts of them.
            step, epoch: where the training stands; the newest is the one with the highest epoch, then step.

        Raises:
            CheckpointError: it could not be written, or never be read; the older ones stand.
        """
        path = self._directory / f"epoch-{epoch:04d}-step-{step:08d}"
        try:
            with new_directory(path) as temporary:
                file = temporary / "state.pt"
                with file.open("wb") as opened:
                    torch.save(state, opened)
                _check_loadable(file, path)
                manifest = {"format": 1, "epoch": epoch, "step": step, "files": {file.name: _describe(file)}}
                write_atomic(temporary / "manifest.json", json.dumps(manifest, indent=2) + "\n")
        except (OSError, RuntimeError) as error:  # torch.save wraps a failed write into a RuntimeError
            cause = error if isinstance(error, OSError) else error.__context__
            if isinstance(cause, OSError):
                raise cannot_write(path, cause, CheckpointError) from error
            raise
        for _, old in all_checkpoints(self._directory)[self._keep :]:
            if old != path:  # a loop that went back saves what is not the newest
                shutil.rmtree(old)
        return path

    def latest(self) -> Loaded | None:
        """The newest checkpoint that is whole, on the CPU; None if there never was one.

        Damaged ones are renamed to `damaged-...`, so that they do not count among those that `save` keeps.

        Raises:
            CheckpointError: there were checkpoints, and all are set aside as damaged or abandoned; or the newest is of
                another format or cannot be read now, and stays as it is.
        """
        for left in list(self._directory.glob(".epoch-*")):  # a process was killed while it wrote
            recover(left.with_name(left.stem[1:]))
        loaded, damaged = _newest(self._directory, self._warn)
        for path in damaged:
            _rename(path, "damaged")
        aside = [path for why in ("damaged", "abandoned") for path in self._directory.glob(f"{why}-epoch-*")]
        if loaded is None and aside:
            raise CheckpointError(
                f"none of the {len(aside)} checkpoints in {self._directory} can be continued",
                f"they are damaged, or were abandoned for another one: {', '.join(path.name for path in aside)}",
                "--resume PATH continues another; --resume never starts anew and keeps them",
            )
        return loaded

    def abandon_after(self, position: Position) -> None:
        """Rename checkpoints newer than that to `abandoned-...`: the run goes on from before them."""
        for newer, path in all_checkpoints(self._directory):
            if newer > position:
                _rename(path, "abandoned")


def newest_path(folder: Path) -> Path | None:
    """The newest checkpoint in a folder by its name, whole or not."""
    found = all_checkpoints(folder)
    return found[0][1] if found else None


def all_checkpoints(folder: Path) -> list[tuple[Position, Path]]:
    """The checkpoints in a folder with their positions by name, newest first, whole or not.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    try:
        named = [(match, path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name)) and path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise _cannot_read(folder, error) from error
    return sorted((((int(match[1]), int(match[2])), path) for match, path in named), reverse=True)


def _newest(folder: Path, warn: Callable[[str], None]) -> tuple[Loaded | None, list[Path]]:
    """The newest checkpoint that is whole, and the damaged ones that were passed over on the way to it."""
    damaged: list[Path] = []
    for _, path in all_checkpoints(folder):
        try:
            return load_checkpoint(path), damaged
        except _DamagedError as error:
            warn(f"{error.what}: {error.cause}; trying the one before")
            damaged.append(path)
    return None, damaged


def _rename(path: Path, why: str) -> None:
    aside = path.with_name(f"{why}-{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)


_OTHER = "name another checkpoint: --resume PATH"


def verify_checkpoint(path: Path) -> Position:
    """Compare a checkpoint with its hash. Epoch and step that it was saved at.

    Raises:
        CheckpointError: it is damaged or of another format, or it cannot be read now.
    """
    file = path / "state.pt"
    try:
        manifest = json.loads((path / "manifest.json").read_bytes())
        if manifest["format"] != 1:
            raise CheckpointError(f"{path} is of format {manifest['format']}", "this hotloop reads 1", _OTHER)
        position = int(manifest["epoch"]), int(manifest["step"])
        expected, actual = manifest["files"][file.name], _describe(file)
    except (FileNotFoundError, NotADirectoryError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise _DamagedError(f"{path} is damaged", f"{type(error).__name__}: {error}", _OTHER) from None
    except OSError as error:
        raise _cannot_read(path, error) from error
    if actual != expected:
        raise _DamagedError(f"{path} is damaged", f"{file.name} is {actual}, expected {expected}", _OTHER)
    return position


def load_checkpoint(path: Path) -> Loaded:
    """Read one checkpoint onto the CPU, its hash verified first.

    Raises:
        CheckpointError: it is damaged or of another format, or it cannot be read now.
    """
    position, file = verify_checkpoint(path), path / "state.pt"
    try:
        return Loaded(path, torch.load(file, map_location="cpu", weights_only=True), position)
    except Exception as error:  # unpickling raises whatever it trips over
        cause = f"it is as it was written, but torch says: {' '.join(str(error).split())}"
        raise CheckpointError(f"{path} cannot be loaded", cause, _OTHER) from error


def named_checkpoint(path: Path, warn: Callable[[str], None] = lambda _: None) -> Loaded:
    """The checkpoint meant by a path: a checkpoint, or the newest good one of a run or of a folder of them.

    Nothing there is changed.

    Args:
        path: another process may be training in it.
        warn: told, in a line, of each damaged checkpoint that is passed over.

    Raises:
        InputError: there is none.
        CheckpointError: it cannot be read, or all of the run's are damaged.
    """
    if (path / "manifest.json").is_file():
        return load_checkpoint(path)
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    loaded, damaged = _newest(folder, warn)
    if loaded is None and damaged:
        raise CheckpointError(
            f"none of the {len(damaged)} checkpoints in {folder} can be read", "all are damaged", "name another run"
        )
    if loaded is None:
        raise InputError(
            f"no checkpoint at {path}",
            "it is neither a checkpoint (a folder with manifest.json), nor a folder of them, nor a run with one",
            "name one: runs/NAME",
        )
    return loaded


def _check_loadable(file: Path, path: Path) -> None:
    """Refuse a state that `load_checkpoint` would refuse; only names are read from the file, no tensors."""
    strangers = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    if strangers:
        raise CheckpointError(
            f"{path} could never be read again: its state holds {', '.join(strangers[:5])}",
            "loading runs no code, and knows tensors, numbers, texts, and lists and dicts of them",
            "save those: str(path), float(number), torch.from_numpy(array)",
        )


def _cannot_read(path: Path, error: OSError) -> CheckpointError:
    fix = "see that the disk is mounted and healthy, then start the same command again"
    return CheckpointError(f"cannot read {path}", error.strerror or str(error), fix)


def _describe(file: Path) -> dict[str, Any]:
    with file.open("rb") as opened:
        return {"sha256": hashlib.file_digest(opened, "sha256").hexdigest(), "bytes": file.stat().st_size}


def young_interval(save_seconds: float, interruption_seconds: float) -> float:
    """Seconds between saves that lose least: sqrt(2 · cost of a save · mean time between interruptions).

    Source: J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974.
    """
    return math.sqrt(2 * save_seconds * interruption_seconds)


class SaveSchedule:
    """Says when the next checkpoint is due.

    "auto": at the end of an epoch if a save would cost at most 1 % of the time since the last one, and within an epoch
    by Young's formula, from the seconds that the last save took.

    Args:
        every: an interval, or "auto".
        interruption_seconds: expected time between interruptions, for "auto".
        clock: seconds, monotonic.
    """

    _FIRST_SAVE_SECONDS = 1.0
    """What a save is taken to cost before there was one."""

    def __init__(
        self, every: Interval | str, interruption_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._every = every
        self._interruption_seconds = interruption_seconds
        self._clock = clock
        self._last = clock()
        self._save_seconds = 0.0

    @property
    def by_clock(self) -> bool:
        """Whether processes with clocks of their own may differ about when one is due."""
        return not isinstance(self._every, Interval) or self._every.unit == "seconds"

    def due(self, step: int, finished_epochs: int | None) -> bool:
        """Whether to save after `step`; `finished_epochs` counts them where one has just ended, None elsewhere."""
        since = self._clock() - self._last
        if isinstance(self._every, Interval):
            match self._every.unit:
                case "steps":
                    return finished_epochs is None and step % int(self._every.amount) == 0
                case "epochs":
                    return finished_epochs is not None and finished_epochs % int(self._every.amount) == 0
                case "seconds":
                    return since >= self._every.amount
        if finished_epochs is not None:
            return since >= 100 * self._save_seconds
        return since >= young_interval(self._save_seconds or self._FIRST_SAVE_SECONDS, self._interruption_seconds)

    def saved(self, seconds: float) -> None:
        """A save has just been done and took so long."""
        self._last = self._clock()
        self._save_seconds = seconds
