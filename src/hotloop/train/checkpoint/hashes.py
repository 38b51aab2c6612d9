"""Hashes of a checkpoint's files, by one process or by all that train together."""

import errno
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hotloop.train.checkpoint.files import describe
from hotloop.train.world import World

_AT_ONCE = 8

Hashes = Callable[[Path, Sequence[str]], dict[str, Any]]
"""From a folder and names of files to what `describe` says of each.

Raises:
    OSError: one cannot be read.
"""


def hash_files(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """By this process: 1 s for 8 GB."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return dict(zip(names, pool.map(lambda name: describe(folder / name), names), strict=True))


class HashedTogether:
    """By all ranks, each some of the files: a checkpoint of thousands of them is not read by one alone.

    The first rank calls this, and `end` when it needs no more; the others `serve` meanwhile.
    """

    def __init__(self, world: World) -> None:
        self._world = world

    def __call__(self, folder: Path, names: Sequence[str]) -> dict[str, Any]:
        self._world.from_first((folder, names))
        found: dict[str, Any] = {}
        for rank, part in enumerate(self._world.gathered(self._own(folder, names))):
            lacking = isinstance(part, FileNotFoundError | NotADirectoryError)
            if lacking and all((folder / name).exists() for name in names):
                raise OSError(errno.ESTALE, f"rank {rank} does not see it: is its disk mounted on that machine?")
            if isinstance(part, OSError):
                raise part
            found |= part
        return found

    def end(self) -> None:
        """Let the others go on."""
        self._world.from_first(None)

    def serve(self) -> None:
        """Do this rank's part until the first one ends it."""
        while asked := self._world.from_first(None):
            self._world.gathered(self._own(*asked))

    def _own(self, folder: Path, names: Sequence[str]) -> dict[str, Any] | OSError:
        try:
            return hash_files(folder, names[self._world.rank :: self._world.size])
        except OSError as error:  # the first rank says what that means
            return error
