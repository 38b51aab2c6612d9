"""How a state gets into files: at once, or in the background while the training goes on."""

import io
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from hotloop.core.errors import CheckpointError, cannot_write
from hotloop.core.files import recover, start_directory, unfinished
from hotloop.core.units import count
from hotloop.train.checkpoint.files import (
    STATE,
    Plan,
    Position,
    Share,
    checkpoint_name,
    part_name,
    write_checkpoint,
)
from hotloop.train.checkpoint.parts import Part, Split, State, header, in_file_order, split
from hotloop.train.checkpoint.staging import Staged, Staging
from hotloop.train.checkpoint.writer import Request, Writer

_LIMIT_SECONDS = 1800.0
"""For other processes to write their parts."""


class Saving(Protocol):
    """A checkpoint that is being written."""

    def done(self) -> bool:
        """Whether it is whole, or this process's share of it. To be asked now and then.

        Raises:
            CheckpointError: it could not be written.
        """

    def end(self) -> Path:
        """Wait until it is.

        Raises:
            CheckpointError: it could not be written.
        """


@dataclass(frozen=True)
class Saved:
    """One that was written at once."""

    path: Path

    def done(self) -> bool:
        return True

    def end(self) -> Path:
        return self.path


class Saver:
    """Writes states into a directory.

    Args:
        keep: how many of the newest checkpoints stay.
        background: write in another process, from a copy in the host's memory.
        share: which of several processes this is.
        warn: told, in a line, if the copy's memory cannot be locked for a GPU.
    """

    def __init__(
        self, directory: Path, keep: int, background: bool, share: Share, warn: Callable[[str], None]
    ) -> None:  # fmt: skip
        self._directory = directory
        self._keep = keep
        self._background = background
        self._share = share
        self._staging = Staging(warn)
        self._writer = Writer()

    def reserve(self, states: Sequence[State]) -> None:
        """Take memory for the copy of a state that will hold what these do together, before there is one.

        Raises:
            CheckpointError: there is not so much.
        """
        tensors = [part.tensor for state in states for part in split(state, self._share.number == 0).parts]
        if not (self._background and tensors):
            return
        try:
            self._staging.reserve(tensors)
        except OSError as error:
            raise cannot_write(self._directory, error, CheckpointError) from error

    def open(self, position: Position) -> None:
        """Make the folder that is filled.

        Raises:
            CheckpointError: it cannot be made.
        """
        path = self._directory / checkpoint_name(position)
        try:
            start_directory(path)
        except OSError as error:
            raise cannot_write(path, error, CheckpointError) from error

    def begin(self, state: State, position: Position) -> Saving:
        """Copy or write a state.

        Raises:
            CheckpointError: it could not be written, or never be read.
        """
        path, first = self._directory / checkpoint_name(position), self._share.number == 0
        try:
            return self._begin(state, position, path, first)
        except BaseException as error:
            if first:
                recover(path)
            if isinstance(error, OSError):
                raise cannot_write(path, error, CheckpointError) from error
            raise

    def _begin(self, state: State, position: Position, path: Path, first: bool) -> Saving:
        parts = split(state, first)
        _check_ranks(parts, self._share, path)
        if not (first or parts.divided):
            return Saved(path)
        share = self._share if parts.divided else Share()
        manifest = {"epoch": position[0], "step": position[1], "tensors": parts.entries}
        plan = Plan(str(path), manifest, self._keep, _LIMIT_SECONDS) if first else None
        temporary = unfinished(path)
        texts = {STATE: _serialised(parts.rest, path)} if first else {}
        if parts.parts or parts.divided:
            texts[part_name(share)] = header(in_file_order(parts.parts))
        if self._background:
            return self._in_background(Request(str(temporary), share, {}, plan), texts, parts, path)
        contents: dict[str, Iterable[memoryview]] = {name: [memoryview(text)] for name, text in texts.items()}
        if parts.parts:
            contents[part_name(share)] = _content(texts[part_name(share)], in_file_order(parts.parts))
        write_checkpoint(temporary, share, contents, plan)
        return Saved(path)

    def _in_background(self, request: Request, texts: dict[str, bytes], parts: Split, path: Path) -> Saving:
        before = self._staging.memory
        staged = self._staging.copy(list(texts.values()), in_file_order(parts.parts))
        if self._staging.memory is not before:
            self._writer.close()  # it has the old memory
        files = {name: [block] for name, block in zip(texts, staged.blocks, strict=False)}
        if parts.parts:
            files[part_name(request.share)] += staged.blocks[len(texts) :]
        request = Request(request.temporary, request.share, files, request.plan)
        return _InBackground(request, staged, self._staging, self._writer, path)

    def close(self) -> None:
        """End what writes in the background."""
        self._writer.close()
        self._staging.close()


class _InBackground:
    """A share that another process writes once it is in the host's memory."""

    def __init__(self, request: Request, staged: Staged, staging: Staging, writer: Writer, path: Path) -> None:
        self._request = request
        self._staged = staged
        self._staging = staging
        self._writer = writer
        self._path = path
        self._asked = False
        self._done = False
        self.done()

    def done(self) -> bool:
        if not self._asked and self._staged.ready():
            self._ask()
        return self._done or (self._asked and self._answered(wait=False))

    def end(self) -> Path:
        if not self._asked:
            self._staged.wait()
            self._ask()
        if not self._done:
            self._answered(wait=True)
        return self._path

    def _ask(self) -> None:
        memory = self._staging.memory
        assert memory
        try:
            self._writer.begin(self._request, memory.descriptor, memory.bytes.nbytes)
        except OSError as error:  # no process can be started
            raise cannot_write(self._path, error, CheckpointError) from error
        self._asked = True

    def _answered(self, wait: bool) -> bool:
        memory = self._staging.memory
        assert memory
        try:
            self._done = self._writer.answered(memory.bytes.data, wait)
        except OSError as error:
            raise cannot_write(self._path, error, CheckpointError) from error
        return self._done


def _check_ranks(parts: Split, share: Share, path: Path) -> None:
    """Files are found by the numbers that ranks have in their process group."""
    highest = max((_highest_rank(entry) for entry in parts.entries if entry["mesh"]), default=0)
    if highest >= share.of:
        raise CheckpointError(
            f"{path} could never be read again: its tensors are divided among other ranks than those that save",
            f"rank {highest} has a part, and {count(share.of, 'rank')} from 0 on {'save' if share.of > 1 else 'saves'}",
            "Checkpointer(..., rank=get_rank(), ranks=get_world_size()), or gather the tensors: tensor.full_tensor()",
        )


def _highest_rank(entry: dict[str, Any]) -> int:
    ranks: list[int] = entry["ranks"]
    return max(ranks, default=math.prod(entry["mesh"]) - 1)


def _content(text: bytes, parts: list[Part]) -> Iterable[memoryview]:
    """A header and its parts, one after another on the host."""
    yield memoryview(text)
    for part in parts:
        yield part.tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def _serialised(rest: State, path: Path) -> bytes:
    """What `torch.load(weights_only=True)` reads; a state that it would refuse is refused now."""
    buffer = io.BytesIO()
    torch.save(rest, buffer)
    buffer.seek(0)
    strangers = torch.serialization.get_unsafe_globals_in_checkpoint(buffer)
    if strangers:
        raise CheckpointError(
            f"{path} could never be read again: its state holds {', '.join(strangers[:5])}",
            "loading runs no code, and knows tensors, numbers, texts, and lists and dicts of them",
            "save those: str(path), float(number), torch.from_numpy(array)",
        )
    return buffer.getvalue()
