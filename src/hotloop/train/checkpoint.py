"""Checkpoints that are whole or not there.

A checkpoint is a directory, `epoch-0003-step-00000120/`: `state.pt`, and `manifest.json` with size and SHA-256 of it.
It is written under a temporary name, fsynced and renamed, and verified before it is loaded.
"""

import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hotloop.core.errors import CheckpointError, InputError, cannot_write
from hotloop.core.files import new_directory, write_atomic
from hotloop.core.units import Interval

State = dict[str, Any]


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that was read and verified."""

    path: Path
    state: State


class Checkpointer:
    """Saves states into a directory and finds the newest good one.

    Args:
        directory: where checkpoints go; it exists.
        keep: how many of the newest stay.
        warn: told, in a line, of each damaged checkpoint that is passed over.

    Example:
        ```python
        checkpointer = hotloop.Checkpointer(Path("checkpoints"))
        loaded = checkpointer.latest()
        checkpointer.save({"model": model.state_dict(), "step": step}, step)
        ```
    """

    def __init__(self, directory: Path, keep: int = 2, warn: Callable[[str], None] = lambda _: None) -> None:
        self._directory = directory
        self._keep = keep
        self._warn = warn

    def save(self, state: State, step: int, epoch: int = 0) -> Path:
        """Write a checkpoint, whole or not at all, then remove the oldest beyond `keep`.

        Args:
            state: what `torch.save` writes and `torch.load(weights_only=True)` reads.
            step, epoch: where the training stands; the newest is the one with the highest epoch, then step.

        Raises:
            CheckpointError: it could not be written; the older ones stand.
        """
        path = self._directory / f"epoch-{epoch:04d}-step-{step:08d}"
        try:
            with new_directory(path) as temporary:
                file = temporary / "state.pt"
                with file.open("wb") as opened:
                    torch.save(state, opened)
                manifest = {"format": 1, "epoch": epoch, "step": step, "files": {file.name: _describe(file)}}
                write_atomic(temporary / "manifest.json", json.dumps(manifest, indent=2) + "\n")
        except (OSError, RuntimeError) as error:  # torch.save wraps a failed write into a RuntimeError
            cause = error if isinstance(error, OSError) else error.__context__
            if isinstance(cause, OSError):
                raise cannot_write(path, cause, CheckpointError) from error
            raise
        for old in self._found()[self._keep :]:
            shutil.rmtree(old)
        return path

    def latest(self) -> Loaded | None:
        """The newest checkpoint that is whole, on the CPU; None if there is none.

        Damaged ones are renamed to `damaged-...`, so that they do not count among those that `save` keeps.

        Raises:
            CheckpointError: there are checkpoints, and all are damaged.
        """
        for unfinished in self._directory.glob(".epoch-*.tmp"):  # a process was killed while it wrote
            shutil.rmtree(unfinished)
        found = self._found()
        for path in found:
            try:
                return load_checkpoint(path)
            except CheckpointError as error:
                self._warn(f"{error.what}: {error.cause}; trying the one before")
                _rename(path, "damaged")
        if found:
            raise CheckpointError(
                f"none of the {len(found)} checkpoints in {self._directory} can be read",
                "all are damaged, as said above",
                "--resume never starts anew and keeps them",
            )
        return None

    def abandon_after(self, name: str) -> None:
        """Rename checkpoints newer than the one of that name to `abandoned-...`: the run goes on from before them."""
        for path in self._found():
            if path.name > name:
                _rename(path, "abandoned")

    def _found(self) -> list[Path]:
        return sorted(self._directory.glob("epoch-*"), reverse=True)


def _rename(path: Path, why: str) -> None:
    aside = path.with_name(f"{why}-{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)


def load_checkpoint(path: Path) -> Loaded:
    """Read one checkpoint onto the CPU, its hash verified first.

    Raises:
        CheckpointError: it is damaged or of another format.
    """
    fix = "name another checkpoint: --resume PATH"
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        files: dict[str, dict[str, Any]] = manifest["files"]
        if manifest["format"] != 1:
            raise CheckpointError(f"{path} is of format {manifest['format']}", "this hotloop reads 1", fix)
        for name, expected in files.items():
            actual = _describe(path / name)
            if actual != expected:
                raise CheckpointError(f"{path} is damaged", f"{name} is {actual}, expected {expected}", fix)
        return Loaded(path, torch.load(path / "state.pt", map_location="cpu", weights_only=True))
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged", f"{type(error).__name__}: {error}", fix) from None


def named_checkpoint(path: Path) -> Loaded:
    """The checkpoint meant by a path: a checkpoint, or a run (its newest good one).

    Raises:
        InputError: there is none.
        CheckpointError: it is damaged.
    """
    if (path / "manifest.json").is_file():
        return load_checkpoint(path)
    folder = path if path.name == "checkpoints" else path / "checkpoints"
    loaded = Checkpointer(folder).latest()
    if loaded is None:
        raise InputError(
            f"no checkpoint at {path}",
            "it is neither auto, nor never, nor a checkpoint (a folder with manifest.json), nor a run with one",
            "--resume runs/NAME, or --resume auto",
        )
    return loaded


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
