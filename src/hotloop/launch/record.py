"""What was launched: a file for each in the folder of the runs, by which it is found again."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from hotloop.core.errors import InputError, cannot_write
from hotloop.core.files import write_atomic
from hotloop.launch.request import FOLDER, Request

_FILE = "launch.json"


@dataclass(frozen=True)
class Launch:
    """One that was handed over.

    Attributes:
        on: the engine.
        id: what that calls it.
        submitted: when, ISO 8601 with its zone.
        host: from which machine.
        folder, run_dir: as in Request.
    """

    name: str
    on: str
    id: str
    nodes: int
    gpus: int
    submitted: str
    host: str
    folder: str
    run_dir: str

    @property
    def log_file(self) -> Path:
        """What engines that write into files write."""
        return Path(self.folder) / "log.txt"

    @property
    def end_file(self) -> Path:
        """How the last start ended: a state, and maybe a reason after it."""
        return Path(self.folder) / "end"

    @property
    def cancel_file(self) -> Path:
        """There once it is to be cancelled: what ends because of that is not started again."""
        return Path(self.folder) / "cancelled"


@contextmanager
def one_at_a_time(request: Request) -> Iterator[None]:
    """While nobody else launches in the same folder; where nothing was launched, nothing of it is left."""
    root = request.folder.parent
    made = next((one for one in [*reversed(root.parents), root] if not one.exists()), root)
    with _locked(root / ".lock"):
        try:
            yield
        except BaseException:
            if [one.name for one in root.iterdir()] == [".lock"]:
                (root / ".lock").unlink()
                _remove_empty(root, made)
            raise


def _locked(path: Path) -> IO[str]:
    """A file that nobody else has locked, made anew if who had it has removed it."""
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with ExitStack() as stack:
                file = stack.enter_context(path.open("w"))
                fcntl.flock(file, fcntl.LOCK_EX)
                if os.path.samestat(path.stat(), os.fstat(file.fileno())):
                    stack.pop_all()
                    return file
        except FileNotFoundError:
            continue
        except OSError as error:
            raise cannot_write(path.parent, error, InputError) from None


def _remove_empty(folder: Path, last: Path) -> None:
    """A folder and those above it up to the last, as long as they are empty."""
    with suppress(OSError):
        folder.rmdir()
        if folder != last:
            _remove_empty(folder.parent, last)


def claim(request: Request) -> Request:
    """Make the launch's folder, with the job in it: the request by a name that no other launch has."""
    candidate, number = request, 1
    while candidate.folder.exists() or (not candidate.named and candidate.run_dir.exists()):
        number += 1
        candidate = request.numbered(number)
    candidate.folder.mkdir()
    write_atomic(candidate.job_file, candidate.job.to_toml())
    return candidate


def keep(launch: Launch) -> Launch:
    """Write it down."""
    write_atomic(Path(launch.folder) / _FILE, json.dumps(asdict(launch), indent=2) + "\n")
    return launch


def list_launches(root: Path) -> list[Launch]:
    """Of all runs in a folder, or in a folder of it; oldest first. What cannot be read is left out."""
    found = []
    for file in {*root.glob(f"{FOLDER}/*/{_FILE}"), *root.glob(f"*/{FOLDER}/*/{_FILE}")}:
        try:
            found.append(Launch(**json.loads(file.read_text())))
        except (OSError, ValueError, TypeError):
            continue
    return sorted(found, key=lambda launch: (launch.submitted, launch.name))


def find_launch(text: str, root: Path) -> Launch:
    """The one of a name, or of an engine's id.

    Args:
        root: in which runs are written, or in a folder of it.

    Raises:
        InputError: there is none, or there are several.
    """
    launches = list_launches(root)
    found = [one for one in launches if one.name == text] or [one for one in launches if one.id == text]
    if len(found) == 1:
        return found[0]
    if found:
        where = ", ".join(one.folder for one in found)
        raise InputError(f"{text} is {len(found)} launches", where, "--root FOLDER, with the folder of one of them")
    names = ", ".join(one.name for one in launches[-3:]) or "none"
    raise InputError(f"no launch {text}", f"launches in {root}: {names}", "hotloop launch status")
