"""The folder that a profile is written into: its name, and that it goes if nothing comes into it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path

from hotloop.core.errors import InputError, cannot_write


def next_folder(root: Path, command: Sequence[str]) -> Path:
    """The next free folder for a script's profile: ROOT/NAME-1, ROOT/NAME-2 and so on."""
    words = [part for word in command for part in word.split()]  # a shell is given several in one
    scripts = [Path(word).stem for word in words if word.endswith(".py")]
    modules = [module.rpartition(".")[2] for word, module in pairwise(command) if word == "-m"]
    name = [*scripts, *modules[-1:], Path(command[0]).name][0]  # the last one: torch's launcher is a module, too
    number = 1
    while (root / f"{name}-{number}").exists():
        number += 1
    return root / f"{name}-{number}"


@contextmanager
def made(folder: Path) -> Iterator[None]:
    """A folder that is gone again, with those above it that had to be made, if nothing came into it.

    Raises:
        InputError: it cannot be made.
    """
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise cannot_write(folder, error, InputError, "--out FOLDER") from None
    try:
        yield
    finally:
        with suppress(OSError):
            for each in missing:
                each.rmdir()
