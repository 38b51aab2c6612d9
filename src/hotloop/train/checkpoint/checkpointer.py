"""Checkpoints that are whole or not there.

A checkpoint is a directory, `epoch-0003-step-00000120/`: `part-*.safetensors` with the large tensors, `state.pt` with
everything else, and `manifest.json` with size and SHA-256 of each file, and its own. It is written under a temporary
name, fsynced and renamed, and verified before it is loaded.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hotloop.core.errors import CheckpointError, InputError
from hotloop.core.files import recover
from hotloop.train.checkpoint import files
from hotloop.train.checkpoint.files import FORMAT, MANIFEST, STATE, Position, Share, difference, read_manifest
from hotloop.train.checkpoint.hashes import Hashes, hash_files
from hotloop.train.checkpoint.parts import State, join, read_whole
from hotloop.train.checkpoint.saving import Saver, Saving


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that was read and verified.

    Attributes:
        position: epoch and step that it was saved at, whatever its folder is called.
    """

    path: Path
    state: State
    position: Position


class DamagedError(CheckpointError):
    """A checkpoint is not as it was written, and never will be again."""


class Checkpointer:
    """Saves states into a directory and finds the newest good one.

    Args:
        directory: where checkpoints go; it exists, and nobody else writes there.
        keep: how many of the newest stay, at least 1.
        warn: told, in a line, of each damaged checkpoint that is passed over, and of memory that cannot be locked.
        background: `begin` returns when the state is in the host's memory, and another process writes it.
        rank: which of the processes this is that save together. Each has the same state, or a part of its tensors
            (`DTensor`). The first one calls `open`, and after that all call `begin`.
        ranks: how many there are.

    Raises:
        InputError: `keep` is less than 1.

    Example:
        ```python
        checkpointer = hotloop.Checkpointer("checkpoints")
        loaded = checkpointer.latest()
        checkpointer.save({"model": model.state_dict(), "step": step}, step)
        ```
    """

    def __init__(
        self, directory: Path | str, keep: int = 2, warn: Callable[[str], None] = lambda _: None,
        background: bool = False, rank: int = 0, ranks: int = 1,
    ) -> None:  # fmt: skip
        if keep < 1:
            raise InputError(f"keep is {keep}; at least 1 is needed", "the newest checkpoint always stays", "keep=2")
        self._directory = Path(directory)
        self._warn = warn
        self._saver = Saver(self._directory, keep, background, Share(rank, ranks), warn)

    def save(self, state: State, step: int, epoch: int = 0) -> Path:
        """Write a checkpoint, whole or not at all, then remove the oldest beyond `keep`.

        Args:
            state: what `torch.load(weights_only=True)` reads: tensors, numbers, texts, and lists and dicts of them.
            step: where the training stands.
            epoch: the newest is the one with the highest epoch, then step.

        Raises:
            CheckpointError: it could not be written, or never be read; the older ones stand.
        """
        self.open(step, epoch)
        return self.begin(state, step, epoch).end()

    def reserve(self, states: Sequence[State]) -> None:
        """Take the host's memory for saving in the background now, so that the first save does not wait for it.

        Args:
            states: as much as these hold together; one that turns out larger is saved all the same.

        Raises:
            CheckpointError: there is not so much.
        """
        self._saver.reserve(states)

    def open(self, step: int, epoch: int = 0) -> None:
        """Make room for a checkpoint that several processes write: the first one does so before any of them begins.

        Raises:
            CheckpointError: it cannot be written.
        """
        self._saver.open((epoch, step))

    def begin(self, state: State, step: int, epoch: int = 0) -> Saving:
        """Begin to save, after `open`; the state may change as soon as this returns. One at a time.

        Raises:
            CheckpointError: it could not be written, or never be read; the older ones stand.
        """
        return self._saver.begin(state, (epoch, step))

    def close(self) -> None:
        """End the process that writes in the background, and let go of its memory."""
        self._saver.close()

    def latest(self, lazily: bool = False, hashes: Hashes = hash_files) -> Loaded | None:
        """The newest checkpoint that is whole, on the CPU; None if there never was one.

        Args:
            lazily: large tensors stay in their files as `StoredTensor`s, which read what they are asked for.
            hashes: who computes those of its files.

        Damaged ones are renamed to `damaged-...`, so that they do not count among those that `save` keeps.

        Raises:
            CheckpointError: there were checkpoints, and all are set aside as damaged or abandoned; or the newest is of
                another format or cannot be read now, and stays as it is.
        """
        for left in list(self._directory.glob(".epoch-*")):  # a process was killed while it wrote
            recover(left.with_name(left.stem[1:]))
        loaded, damaged = _newest(self._directory, self._warn, lazily, hashes)
        for path in damaged:
            _rename(path, "damaged")
        if loaded is None:
            refuse_set_aside(self._directory, RESUME_ANOTHER)
        return loaded

    def abandon_for(self, chosen: Loaded) -> None:
        """Rename those that the run does not come from, if it goes on from that one, to `abandoned-...`.

        These are the newer ones, and another one of the same position.
        """
        manifest = (chosen.path / MANIFEST).read_bytes()
        for at, path in all_checkpoints(self._directory):
            file = path / MANIFEST
            is_chosen = at == chosen.position and file.is_file() and file.read_bytes() == manifest
            if at >= chosen.position and not is_chosen:
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
        return files.all_checkpoints(folder)
    except OSError as error:
        raise _cannot_read(folder, error) from error


def _newest(
    folder: Path, warn: Callable[[str], None], lazily: bool, hashes: Hashes
) -> tuple[Loaded | None, list[Path]]:  # fmt: skip
    """The newest checkpoint that is whole, and the damaged ones that were passed over on the way to it."""
    damaged: list[Path] = []
    for _, path in all_checkpoints(folder):
        try:
            return load_checkpoint(path, lazily, hashes), damaged
        except DamagedError as error:
            warn(f"{error.what}: {error.cause}; trying the one before")
            damaged.append(path)
    return None, damaged


def _rename(path: Path, why: str) -> None:
    """What an earlier start has set aside stays: a run that goes back comes to the same positions again."""
    names = itertools.chain([f"{why}-{path.name}"], (f"{why}-{path.name}-{number}" for number in itertools.count(2)))
    path.rename(next(aside for name in names if not (aside := path.with_name(name)).exists()))


RESUME_ANOTHER = "--resume PATH continues another; --resume never starts anew and keeps them"
_OTHER = "name another checkpoint; of a training: --resume PATH"


def set_aside(folder: Path) -> list[str]:
    """Names of checkpoints that a training does not continue any more: damaged ones, and those it went back from."""
    return [path.name for why in ("damaged", "abandoned") for path in sorted(folder.glob(f"{why}-epoch-*"))]


def refuse_set_aside(folder: Path, fix: str = "name another run") -> None:
    """Raise CheckpointError where those that are set aside are all there are."""
    if aside := set_aside(folder):
        what = f"all {len(aside)} checkpoints in {folder} are set aside"
        raise CheckpointError(what, f"they are damaged, or were abandoned for another one: {', '.join(aside)}", fix)


def verify_checkpoint(path: Path, hashes: Hashes = hash_files) -> Position:
    """Compare a checkpoint's files with their hashes. Epoch and step that it was saved at.

    Args:
        hashes: who computes them; then nothing but the manifest has to be there.

    Raises:
        CheckpointError: it is damaged or of another format, or it cannot be read now.
    """
    manifest = _manifest(path, hashes)
    return int(manifest["epoch"]), int(manifest["step"])


def _manifest(path: Path, hashes: Hashes | None) -> dict[str, Any]:
    """The manifest of a checkpoint; with `hashes`, one whose files are as it says."""
    try:
        manifest = read_manifest((path / MANIFEST).read_bytes())
        if manifest["format"] not in (1, FORMAT):
            other = f"format {manifest['format']}"
            raise CheckpointError(f"{path} is of {other}", f"this hotloop reads up to {FORMAT}, not {other}", _OTHER)
        int(manifest["epoch"]), int(manifest["step"]), manifest["files"][STATE]
        expected = dict(manifest["files"])
        actual = hashes(path, list(expected)) if hashes else expected
    except FileNotFoundError as error:
        raise DamagedError(f"{path} is damaged", f"{Path(error.filename or path).name} is missing", _OTHER) from None
    except IsADirectoryError as error:
        raise DamagedError(f"{path} is damaged", f"{Path(error.filename or path).name} is a folder", _OTHER) from None
    except ValueError as error:
        raise DamagedError(f"{path} is damaged", str(error), _OTHER) from None
    except (NotADirectoryError, LookupError, TypeError) as error:
        cause = f"{MANIFEST} does not say what it should: {type(error).__name__}: {error}"
        raise DamagedError(f"{path} is damaged", cause, _OTHER) from None
    except OSError as error:
        raise _cannot_read(path, error) from error
    for name in expected:
        if actual[name] != expected[name]:
            raise DamagedError(f"{path} is damaged", difference(name, actual[name], expected[name]), _OTHER)
    return manifest


def load_checkpoint(path: Path, lazily: bool = False, hashes: Hashes | None = hash_files) -> Loaded:
    """Read one checkpoint onto the CPU, its hashes verified first.

    Args:
        lazily: as in `Checkpointer.latest`.
        hashes: who computes them; None for a checkpoint that has just been verified.

    Raises:
        CheckpointError: it is damaged or of another format, or it cannot be read now.
    """
    manifest = _manifest(path, hashes)
    parts = [name for name in manifest["files"] if name != STATE]
    try:
        state = torch.load(path / STATE, map_location="cpu", weights_only=True)
        state = join(state, path, manifest.get("tensors", []), parts)
        state = state if lazily else read_whole(state)
    except Exception as error:  # unpickling raises whatever it trips over
        cause = f"it is as it was written, but torch says: {' '.join(str(error).split())}"
        raise CheckpointError(f"{path} cannot be loaded", cause, _OTHER) from error
    return Loaded(path, state, (int(manifest["epoch"]), int(manifest["step"])))


def named_checkpoint(
    path: Path, warn: Callable[[str], None] = lambda _: None, lazily: bool = False, hashes: Hashes = hash_files
) -> Loaded:  # fmt: skip
    """The checkpoint meant by a path: a checkpoint, or the newest good one of a run or of a folder of them.

    Nothing there is changed.

    Args:
        path: another process may be training in it.
        warn: told, in a line, of each damaged checkpoint that is passed over.
        lazily, hashes: as in `Checkpointer.latest`.

    Raises:
        InputError: there is none.
        CheckpointError: it cannot be read, or all of the run's are damaged.
    """
    if (path / MANIFEST).is_file():
        return load_checkpoint(path, lazily, hashes)
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    loaded, damaged = _newest(folder, warn, lazily, hashes)
    if loaded is None and damaged:
        raise CheckpointError(
            f"none of the {len(damaged)} checkpoints in {folder} can be read", "all are damaged", "name another run"
        )
    if loaded is None:
        refuse_set_aside(folder)
        raise InputError(
            f"no checkpoint at {path}",
            "it is neither a checkpoint (a folder with manifest.json), nor a folder of them, nor a run with one",
            "name one: runs/NAME",
        )
    return loaded


def _cannot_read(path: Path, error: OSError) -> CheckpointError:
    fix = "see that the disk is mounted and healthy, then start the same command again"
    return CheckpointError(f"cannot read {path}", error.strerror or str(error), fix)
