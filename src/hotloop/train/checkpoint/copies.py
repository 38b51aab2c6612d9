"""Copies of a run's checkpoints in object storage, made beside the training: what remains when the disk does not."""

import errno
import itertools
import os
import shutil
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotloop.core.errors import CheckpointError, InputError
from hotloop.core.files import finish_directory, start_directory
from hotloop.core.job import CheckpointSection, StorageSection
from hotloop.core.units import count
from hotloop.data.object_store import obstore_module, open_store, reason
from hotloop.storage.client_key import SUFFIX, ClientKey, Damaged, WrongKey
from hotloop.storage.encryption import NotEncrypted, encryption
from hotloop.train.checkpoint.checkpointer import DamagedError, newest_path, verify_checkpoint
from hotloop.train.checkpoint.files import MANIFEST, Position, checkpoint_name, describe, position_of, read_manifest

_PIECE_BYTES, _AT_ONCE = 1 << 24, 16
_PATIENCE = 10
_PART_BYTES, _MOST_PARTS = 1 << 24, 9000
"""Of an object that is sent in parts; a store takes 10,000 of them."""
_PROBE = ".hotloop-"
_EARLIER = "use an earlier one"
_SENT, _BEGUN = ".copied-", ".fetched-"
"""Beside checkpoints: what is being sent, and what has come so far."""


class _DamagedCopy(CheckpointError):
    """A copy is not the checkpoint that it is called."""


@dataclass(frozen=True)
class Copy:
    """What came of copying a checkpoint.

    Attributes:
        place: where it is; or should be.
        trouble: why it is not; empty if it is.
        refused: the store does not encrypt as it was asked to: nothing more must go there.
    """

    place: str
    seconds: float
    trouble: str = ""
    refused: NotEncrypted | None = None


def remove_left(folder: Path) -> None:
    """Remove what a killed start had put aside to send, and what it had fetched of copies that are not newer."""
    newest = newest_path(folder)
    for left in [path for path in folder.glob(".*") if path.name.startswith((_SENT, _BEGUN))]:
        if left.name.startswith(_SENT) or (newest and left.name <= f"{_BEGUN}{newest.name}"):
            shutil.rmtree(left)


class Copies:
    """Copies of one run's checkpoints.

    Args:
        settings: where they go.
        storage: how they are encrypted.
        run: the run's name.

    Raises:
        InputError: obstore is not installed, or the store does not do what is asked for, or does not answer.
    """

    def __init__(self, settings: CheckpointSection, storage: StorageSection, run: str) -> None:
        self.url = f"{settings.copy_to.rstrip('/')}/{run}"
        self._keep = settings.keep
        self._encryption = encryption(storage, self.url)
        self._key = ClientKey(storage.client_key) if storage.client_key else None
        self._obstore = obstore_module()
        self._store = open_store(self.url, **self._encryption.settings)
        # Twelve parts of 16 MiB, which are sent at once, take more than 30 s on a line of less than 54 Mbit/s.
        self._patient = open_store(self.url, patience=_PATIENCE, **self._encryption.settings)
        self._threads = ThreadPoolExecutor(1, "hotloop-copies")
        self._begun: list[Future[Copy]] = []
        self._numbers = itertools.count()
        self._aside = Path()
        self._refused: NotEncrypted | None = None
        self.positions()
        self._try()

    def _try(self) -> None:
        """Write a few bytes and remove them: what a store does not allow is told before anything is trained."""
        name = f"{_PROBE}{uuid.uuid4().hex}"
        try:
            self._obstore.put(self._store, name, b"hotloop")
            self._verify(name)
            self._obstore.delete(self._store, name)
        except NotEncrypted as error:
            raise InputError(error.what, error.cause, error.fix) from None
        except (self._obstore.exceptions.BaseError, OSError) as error:
            fix = "hotloop storage policy JOB says what the credentials must be allowed"
            raise InputError(f"checkpoint.copy_to: {self.url} cannot be written", reason(error), fix) from None

    def positions(self) -> list[Position]:
        """Of the whole ones, newest first.

        Raises:
            InputError: the store does not answer.
        """
        return self._whole(f"/{MANIFEST}", f"/{MANIFEST}{SUFFIX}")

    def _whole(self, *manifests: str) -> list[Position]:
        names = {name.rpartition("/")[0] for name in self._names() if name.endswith(manifests)}
        return sorted((position for name in names if (position := position_of(name))), reverse=True)

    def _checkpoints(self) -> set[str]:
        """Whole or not. Somebody's data, or another run's copies, may lie in folders beside them."""
        return {name for path in self._names() if position_of(name := path.partition("/")[0])}

    def _names(self) -> list[str]:
        try:
            return [each["path"] for page in self._obstore.list(self._store) for each in page]
        except (self._obstore.exceptions.BaseError, OSError) as error:
            fix = "see that the machine's credentials may list and write there"
            raise InputError(f"checkpoint.copy_to: {self.url} does not answer", reason(error), fix) from None

    def fetch_newest(
        self, folder: Path, warn: Callable[[str], None], alive: Callable[[], None] = lambda: None,
        after: Position | None = None,
    ) -> Path | None:  # fmt: skip
        """Bring the newest one that is whole to a folder; nothing if there is none.

        Args:
            alive: called with each piece that has come.
            after: only one that is newer than this; where none of those can be used, that is what there is.

        Raises:
            CheckpointError: one cannot be read now, or not by this hotloop; or there are some, and none can be used:
                they are damaged, or encrypted for another key, or not encrypted by a key although the job names one.
            OSError: it cannot be written.
        """
        failed = list[CheckpointError]()
        for position in _newer(self._whole(f"/{MANIFEST}{SUFFIX}" if self._key else f"/{MANIFEST}"), after):
            try:
                return self._fetched(position, folder, alive)
            except (WrongKey, Damaged, _DamagedCopy) as error:
                failed.append(error)
                warn(f"{self.url}/{checkpoint_name(position)}: {error.cause}; trying the one before")
        if failed and after:
            return None
        if failed:
            what = f"none of the {count(len(failed), 'copy', 'copies')} at {self.url} can be used"
            raise CheckpointError(what, failed[0].cause, failed[0].fix)
        if others := _newer(self.positions(), after):
            what = f"{count(len(others), 'copy', 'copies')} at {self.url} cannot be used"
            if self._key:
                cause = "storage.client_key is set, and they are not encrypted"
                raise CheckpointError(what, cause, '--set storage.client_key=""')
            cause = "they are encrypted, and storage.client_key is not set"
            raise CheckpointError(what, cause, "--set storage.client_key=file:KEY")
        return None

    def _fetched(self, position: Position, folder: Path, alive: Callable[[], None]) -> Path:
        """The manifest first: a wrong key is told before anything large is fetched. Files that an earlier start has
        brought stay if they are what the manifest says; what a wrong copy or a full disk leaves does not.
        """
        name = checkpoint_name(position)
        begun = folder / f"{_BEGUN}{name}"
        for other in folder.glob(f"{_BEGUN}*"):
            if other != begun:
                shutil.rmtree(other)
        begun.mkdir(exist_ok=True)
        try:
            self._fetch_missing(name, begun, alive)
            begun.replace(start_directory(folder / name))
            finish_directory(folder / name)
        except (WrongKey, Damaged, OSError):
            shutil.rmtree(begun, ignore_errors=True)
            raise
        try:
            found = verify_checkpoint(folder / name)
            if found == position:
                return folder / name
            cause = f"it is the checkpoint of epoch {found[0]}, step {found[1]}: another one was put in its place"
            error = CheckpointError(f"{name} is another one", cause, _EARLIER)
        except DamagedError as damaged:
            error = damaged
        shutil.rmtree(folder / name)  # the store still has it
        raise _DamagedCopy(error.what, error.cause, error.fix)

    def _fetch_missing(self, name: str, begun: Path, alive: Callable[[], None]) -> None:
        """Fetch what is not there yet."""
        names = [path.rpartition("/")[2] for path in self._names() if path.startswith(f"{name}/")]
        own = {each.removesuffix(SUFFIX): each for each in names if each.endswith(SUFFIX) == bool(self._key)}
        described: dict[str, Any] = {}
        for plain in sorted(own, key=lambda each: each != MANIFEST):
            file, sent = begun / plain, begun / own[plain]
            if plain in described and file.exists() and describe(file) == described[plain]:
                continue
            self._fetch(f"{name}/{own[plain]}", sent, alive)
            if self._key:
                self._key.decrypt(sent, file)
                sent.unlink()
            if plain == MANIFEST:
                with suppress(AttributeError, KeyError, TypeError, ValueError):  # then the whole is found to be damaged
                    described = dict(read_manifest(file.read_bytes())["files"])
        for left in [file for file in begun.iterdir() if file.name not in own]:
            left.unlink()

    def _fetch(self, name: str, file: Path, alive: Callable[[], None]) -> None:
        """In pieces, some at a time: a store's patience is for one answer, and one stream does not fill a wide line."""
        try:
            size = self._obstore.head(self._store, name)["size"]
            with file.open("wb") as opened, ThreadPoolExecutor(_AT_ONCE) as pool:

                def fetch(start: int) -> None:
                    length = min(_PIECE_BYTES, size - start)
                    piece = self._obstore.get_range(self._patient, name, start=start, length=length)
                    if os.pwrite(opened.fileno(), piece, start) < length:
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))

                for _ in pool.map(fetch, range(0, size, _PIECE_BYTES)):
                    alive()
        except self._obstore.exceptions.BaseError as error:
            fix = "see whether the store answers, and start again"
            raise CheckpointError(f"{self.url}/{name} cannot be read", reason(error), fix) from None

    def begin(self, checkpoint: Path) -> None:
        """Copy one as soon as the one before is done; of those that wait only the newest is copied."""
        if self._begun and self._begun[-1].cancel():
            shutil.rmtree(self._aside)
        # One of that name may still be sent: a position is saved again by a run that went back to it.
        self._aside = checkpoint.with_name(f"{_SENT}{next(self._numbers)}-{checkpoint.name}")
        try:
            shutil.copytree(checkpoint, self._aside, copy_function=_link)  # it may be removed before it is sent
        except (OSError, shutil.Error) as error:
            failed: Future[Copy] = Future()
            failed.set_result(Copy(f"{self.url}/{checkpoint.name}", 0.0, str(error)))
            self._begun.append(failed)
            return
        self._begun.append(self._threads.submit(self._copied, self._aside, checkpoint.name))

    def make_up(self, checkpoint: Path) -> None:
        """Copy one that an earlier start was ended before it had sent.

        Raises:
            InputError: the store does not answer.
        """
        if position_of(checkpoint.name) not in self.positions():
            self.begin(checkpoint)

    def done(self) -> bool:
        """Whether nothing is under way."""
        return all(one.done() for one in self._begun)

    def finished(self, wait: bool = False) -> list[Copy]:
        """What has been copied, or could not be, since this was last asked.

        Args:
            wait: for all that have been begun.
        """
        done = [one for one in self._begun if wait or one.done()]
        self._begun = [one for one in self._begun if one not in done]
        return [one.result() for one in done if not one.cancelled()]

    def drop_newer(self, position: Position, or_same: bool = False) -> None:
        """Remove those after a position, or the one at it too: the run goes on from another one."""
        for there in self.positions():
            if there > position or (or_same and there == position):
                self._remove(checkpoint_name(there))

    def close(self) -> None:
        """Copy nothing more."""
        self._threads.shutdown(cancel_futures=True)

    def _copied(self, folder: Path, name: str) -> Copy:
        place, started, trouble = f"{self.url}/{name}", time.perf_counter(), ""
        if self._refused:  # nothing more goes there, also if the training has not heard of it yet
            shutil.rmtree(folder, ignore_errors=True)
            return Copy(place, 0.0, self._refused.cause, self._refused)
        try:
            if name in self._checkpoints():
                self._remove(name)  # else its manifest would stand beside files of two
            for file in sorted(folder.iterdir(), key=lambda file: file.name == MANIFEST):  # it says: all are there
                self._send(file, f"{name}/{file.name}")
            kept = {checkpoint_name(position) for position in self.positions()[: self._keep]}
            for old in self._checkpoints() - kept - {name}:
                self._remove(old)
        except (self._obstore.exceptions.BaseError, OSError) as error:
            trouble = reason(error)
        except NotEncrypted as error:
            trouble, self._refused = error.cause, error
        except InputError as error:
            trouble = error.cause
        shutil.rmtree(folder, ignore_errors=True)
        return Copy(place, time.perf_counter() - started, trouble, self._refused)

    def _send(self, file: Path, name: str) -> None:
        if self._key:
            encrypted = file.with_name(f"{file.name}{SUFFIX}")
            self._key.encrypt(file, encrypted)
            file, name = encrypted, f"{name}{SUFFIX}"
        self._obstore.put(self._patient, name, file, chunk_size=max(_PART_BYTES, file.stat().st_size // _MOST_PARTS))
        if self._key:
            file.unlink()  # the disk has room for one more of them, not for all
        self._verify(name)

    def _verify(self, name: str) -> None:
        """An object of which it is not known that it was encrypted as was asked for does not stay."""
        try:
            self._encryption.verify(self._store, self.url, name)
        except (NotEncrypted, OSError):
            with suppress(self._obstore.exceptions.BaseError, OSError):  # what is wrong with it says more
                self._obstore.delete(self._store, name)
            raise

    def _remove(self, name: str) -> None:
        found = sorted(path for path in self._names() if path.startswith(f"{name}/"))
        for path in sorted(found, key=lambda path: not path.removesuffix(SUFFIX).endswith(MANIFEST)):
            self._obstore.delete(self._store, path)


def _newer(positions: list[Position], than: Position | None) -> list[Position]:
    return [position for position in positions if than is None or position > than]


def _link(file: str, link: str) -> None:
    try:
        os.link(file, link)
    except OSError:  # not every file system has links
        shutil.copyfile(file, link)
