"""Which copies of checkpoints there are in object storage, whether they are whole, and one of them brought here."""

import errno
import hashlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hotloop.core.errors import FIXES, CheckpointError, HotloopError, InputError, cannot_write
from hotloop.core.units import count, format_bytes
from hotloop.data.object_store import is_remote, obstore_module, open_store, reason, refused
from hotloop.storage.client_key import SUFFIX, ClientKey, Writes
from hotloop.train.checkpoint.checkpointer import verify_checkpoint
from hotloop.train.checkpoint.files import MANIFEST, position_of
from hotloop.train.checkpoint.table import Stored

_AT_ONCE, _PIECE_BYTES = 8, 1 << 24
_PATIENCE = 10


@dataclass(frozen=True)
class _Copy:
    """A copy, and how its files are called: below the place that is looked at, with `SUFFIX` if they are encrypted."""

    stored: Stored
    below: str
    suffix: str


class _Digest:
    """What is written to it is hashed and counted, and handed on.

    Args:
        kept: who gets it too.
        alive: told how many bytes have come.
    """

    def __init__(self, kept: Writes | None, alive: Callable[[int], object]) -> None:
        self._kept, self._alive = kept, alive
        self._sha256, self._size = hashlib.sha256(), 0

    def write(self, content: bytes) -> int:
        self._sha256.update(content)
        self._size += len(content)
        if self._kept:
            self._kept.write(content)
        self._alive(len(content))
        return len(content)

    def flush(self) -> None:
        """Nothing waits."""

    def described(self) -> dict[str, Any]:
        return {"sha256": self._sha256.hexdigest(), "bytes": self._size}


class _Object:
    """An object as a file that is open for reading.

    Raises:
        FileNotFoundError: there is none.
        OSError: the store does not answer; its number tells it from what age finds in a file.
    """

    def __init__(self, store: Any, name: str) -> None:
        self._name = name
        with self._told():
            self._reader = obstore_module().open_reader(store, name, buffer_size=_PIECE_BYTES)

    def read(self, size: int = -1) -> bytes:
        with self._told():
            return bytes(self._reader.read(size))

    def close(self) -> None:
        self._reader.close()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, "there is no such object", self._name.removesuffix(SUFFIX)) from None
        except (obstore_module().exceptions.BaseError, OSError) as error:
            raise OSError(errno.EIO, reason(error), self._name) from None


class _Content:
    """The files of one copy, decrypted.

    Args:
        keeps: whether they are written where they are verified.
        alive: told how many bytes have come.
    """

    def __init__(
        self, store: Any, copy: _Copy, key: ClientKey | None, keeps: bool, alive: Callable[[int], object]
    ) -> None:  # fmt: skip
        self._store, self._copy, self._key, self._keeps, self._alive = store, copy, key, keeps, alive

    def write(self, name: str, target: Writes) -> None:
        with closing(_Object(self._store, f"{self._copy.below}{name}{self._copy.suffix}")) as source:
            if self._copy.suffix and self._key:
                self._key.decrypt_stream(source, target, name)
            else:
                while piece := source.read(_PIECE_BYTES):
                    target.write(piece)

    def hashes(self, folder: Path, names: Sequence[str]) -> dict[str, Any]:
        """As `hash_files`, of what the store has."""
        if other := [name for name in names if Path(name).name != name]:
            raise ValueError(f"{other[0]} is no name of a checkpoint's file")
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return dict(zip(names, pool.map(partial(self._described, folder), names), strict=True))

    def _described(self, folder: Path, name: str) -> dict[str, Any]:
        with (folder / name).open("wb") if self._keeps else nullcontext() as kept:
            digest = _Digest(kept, self._alive)
            self.write(name, digest)
        return digest.described()


class Copied:
    """The copies of a run, of all runs below a place, or the one that this is; of each run oldest first.

    One whose manifest has not come yet is none.

    Args:
        url: of the place.
        client_key: `storage.client_key` of the job, for copies that are encrypted by it.

    Raises:
        InputError: there is none, or the store does not answer.
    """

    def __init__(self, url: str, client_key: str = "") -> None:
        if not is_remote(url):
            raise InputError(f"{url} is no place in object storage", "s3://, gs:// and az:// are", "s3://bucket/folder")
        self._url, self._key = url.rstrip("/"), ClientKey(client_key) if client_key else None
        self._store = open_store(self._url, patience=_PATIENCE)
        self._found = _copies(self._url, self._store)
        if not self._found:
            cause = "it is neither a copy of a checkpoint, nor of a run, nor a place with some"
            raise InputError(f"no checkpoint at {self._url}", cause, "name what checkpoint.copy_to names")

    def stored(self) -> list[Stored]:
        """What there is; its content is not read."""
        return [copy.stored for copy in self._found]

    def verified(self, alive: Callable[[int], object] = lambda _: None) -> Iterator[Stored]:
        """Each as soon as it is read whole and compared with its hash; nothing of it is written to the disk.

        One that a training has meanwhile removed, as it keeps the newest ones, or is sending again, is left out.

        Args:
            alive: told how many bytes have come.

        Raises:
            InputError: the store does not answer, or a key is needed that is not given.
        """
        self._require_key()
        for copy in self._found:
            with TemporaryDirectory(prefix="hotloop-") as name:
                damage = self._damage(copy, Path(name), False, alive)
            if not damage or copy in _copies(self._url, self._store):
                yield replace(copy.stored, damage=damage)

    def fetch_newest(
        self, folder: Path, warn: Callable[[str], None], alive: Callable[[int], object] = lambda _: None
    ) -> tuple[Path, str]:
        """Bring the newest one that is whole to a folder: where it is, and where it came from.

        Args:
            warn: told, in a line, of each damaged one that is passed over.
            alive: told how many bytes have come.

        Raises:
            InputError: they are of several runs, there is no room, the store does not answer, or a key is needed.
            CheckpointError: all are damaged.
        """
        self._require_key()
        runs = sorted({str(copy.stored.path).rpartition("/")[0] for copy in self._found})
        if len(runs) > 1:
            raise InputError(f"{self._url} has copies of {len(runs)} runs", "one is meant", f"name it: {runs[0]}")
        for copy in reversed(self._found):
            free = shutil.disk_usage(folder).free
            if free < copy.stored.size_bytes:
                cause = f"{format_bytes(free)} are free below {folder.parent}, where it is brought first"
                raise InputError(f"{copy.stored.path} has {format_bytes(copy.stored.size_bytes)}", cause, "make room")
            path = folder / str(copy.stored.path).rpartition("/")[2]
            path.mkdir()
            if not (damage := self._damage(copy, path, True, alive)):
                return path, str(copy.stored.path)
            shutil.rmtree(path)
            warn(f"{copy.stored.path} is damaged: {damage}")
        what = f"none of the {count(len(self._found), 'copy', 'copies')} at {self._url} can be read"
        raise CheckpointError(what, "all are damaged", "name another run")

    def _require_key(self) -> None:
        if self._key is None and any(copy.suffix for copy in self._found):
            cause = "they are encrypted by a key that does not leave its machine"
            raise InputError(f"copies at {self._url} cannot be read", cause, "--client-key file:KEY")

    def _damage(self, copy: _Copy, folder: Path, keeps: bool, alive: Callable[[int], object]) -> str:
        content = _Content(self._store, copy, self._key, keeps, alive)
        return _damage(content, copy, folder, encrypted=self._key is not None)


def _copies(url: str, store: Any) -> list[_Copy]:
    objects: dict[str, dict[str, Any]] = {}
    try:
        for page in obstore_module().list(store):
            for each in page:
                folder, slash, name = each["path"].rpartition("/")
                objects.setdefault(folder + slash, {})[name] = each
    except (obstore_module().exceptions.BaseError, OSError) as error:
        raise refused(url, error) from None
    found = []
    for below, files in objects.items():
        path = f"{url}/{below}".rstrip("/")
        position = position_of(path.rpartition("/")[2])
        suffix = "" if MANIFEST in files else SUFFIX
        if position and f"{MANIFEST}{suffix}" in files:
            size = sum(each["size"] for each in files.values())
            saved = files[f"{MANIFEST}{suffix}"]["last_modified"].timestamp()
            found.append(_Copy(Stored(path, position, size, saved), below, suffix))
    return sorted(found, key=lambda copy: (str(copy.stored.path).rpartition("/")[0], copy.stored.position))


def _damage(content: _Content, copy: _Copy, folder: Path, encrypted: bool) -> str:
    """Why a copy cannot be used; empty if it can.

    Raises:
        InputError: the store does not answer, or the disk takes no more.
    """
    if encrypted and not copy.suffix:
        return "it is not encrypted, and a key was given: a run with that key does not take it"
    try:
        with (folder / MANIFEST).open("wb") as manifest:
            content.write(MANIFEST, manifest)
        position = verify_checkpoint(folder, content.hashes)
    except FileNotFoundError as error:
        return f"{error.filename} is missing"
    except CheckpointError as error:
        if isinstance(error.__cause__, OSError):  # it could not be read, which says nothing of what is there
            raise _cannot(copy, folder, error.__cause__) from None
        return error.cause
    except OSError as error:
        raise _cannot(copy, folder, error) from None
    if position != copy.stored.position:
        return f"it is the checkpoint of epoch {position[0]}, step {position[1]}: another one was put in its place"
    return ""


def _cannot(copy: _Copy, folder: Path, error: OSError) -> HotloopError:
    """Words for a store that does not let us read, or for a disk that does not take what was read."""
    if error.errno in FIXES:
        return cannot_write(folder.parent, error, InputError)
    return refused(str(copy.stored.path), error)
