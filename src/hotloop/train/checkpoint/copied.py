"""Which copies of checkpoints there are in object storage, whether they are whole, and one of them brought here."""

import errno
import hashlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any

from hotloop.core.errors import CheckpointError, HotloopError, InputError, cannot_write
from hotloop.core.units import count, format_bytes
from hotloop.data.object_store import is_remote, obstore_module, open_store, reason, refused
from hotloop.storage.client_key import SUFFIX, ClientKey, Damaged, Writes, WrongKey
from hotloop.train.checkpoint.checkpointer import DamagedError, verify_checkpoint
from hotloop.train.checkpoint.files import MANIFEST, position_of
from hotloop.train.checkpoint.table import Stored

_AT_ONCE, _PIECE_BYTES = 8, 1 << 24
_PATIENCE = 10
_LISTINGS = 5
"""So often what there is may change while it is read."""
_EARLIER = "name an earlier one"


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


class _StoreError(OSError):
    """A store does not answer, which says nothing of what is there."""


class _Object:
    """An object as a file that is open for reading.

    Raises:
        FileNotFoundError: there is none.
        _StoreError: the store does not answer; its number tells it from what age finds in a file.
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
            raise _StoreError(errno.EIO, reason(error), self._name) from None


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
        self._stopped = Event()

    def write(self, name: str, target: Writes) -> None:
        with closing(_Object(self._store, f"{self._copy.below}{name}{self._copy.suffix}")) as source:
            if self._copy.suffix and self._key:
                self._key.decrypt_stream(source, target, name)
            else:
                while piece := source.read(_PIECE_BYTES):
                    target.write(piece)

    def hashes(self, folder: Path, names: Sequence[str]) -> dict[str, Any]:
        """As `hash_files`, of what the store has.

        Raises:
            ValueError: a name may be that of a file elsewhere: others may write to a store.
        """
        if other := [name for name in names if name in ("", "..", MANIFEST) or Path(name).name != name]:
            raise ValueError(f"{other[0]!r} is no name of a checkpoint's file")
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            try:
                found = {name: pool.submit(self._described, folder, name) for name in names}
                for done in wait(found.values(), return_when=FIRST_EXCEPTION).done:
                    done.result()
            except BaseException:  # else leaving would wait until all that is under way has come
                self._stopped.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return {name: each.result() for name, each in found.items()}

    def _described(self, folder: Path, name: str) -> dict[str, Any]:
        with (folder / name).open("wb") if self._keeps else nullcontext() as kept:
            digest = _Digest(kept, self._came)
            self.write(name, digest)
        return digest.described()

    def _came(self, more: int) -> None:
        if self._stopped.is_set():
            raise OSError(errno.ECANCELED, "it is stopped")  # EINTR would be tried again by who decrypts
        self._alive(more)


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
        self._found = self._listed()

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
            damage = ""
            with TemporaryDirectory(prefix="hotloop-") as name:
                try:
                    self._read(copy, Path(name), False, alive)
                except CheckpointError as error:
                    damage = error.cause
            if not damage or copy in _copies(self._url, self._store):
                yield replace(copy.stored, damage=damage)

    def fetch_newest(
        self, folder: Path, warn: Callable[[str], None], alive: Callable[[int], object] = lambda _: None
    ) -> tuple[Path, str]:
        """Bring the newest one that is whole to a folder: where it is, and where it came from.

        Args:
            warn: told, in a line, of each that is passed over.
            alive: told how many bytes have come.

        Raises:
            InputError: they are of several runs, there is no room, the store does not answer, or a key is needed.
            CheckpointError: none can be used, or the newest is of another format.
        """
        self._require_key()
        for _ in range(_LISTINGS):
            failed = list[CheckpointError]()
            for copy in reversed(self._found):
                path = folder / "copy"
                try:
                    return self._fetched(copy, path, alive), str(copy.stored.path)
                except (DamagedError, WrongKey, Damaged) as error:
                    shutil.rmtree(path)
                    if copy not in _copies(self._url, self._store):
                        break  # a training has meanwhile removed it
                    warn(f"{copy.stored.path} cannot be used: {error.cause}")
                    failed.append(error)
            else:
                what = f"none of the {count(len(failed), 'copy', 'copies')} at {self._url} can be used"
                raise CheckpointError(what, failed[0].cause, failed[0].fix)
            self._found = self._listed()
        raise InputError(f"copies at {self._url} are replaced while they are read", "a training saves", "try it again")

    def _fetched(self, copy: _Copy, path: Path, alive: Callable[[int], object]) -> Path:
        run, size = str(copy.stored.path).rpartition("/")[0], copy.stored.size_bytes
        if others := sorted({str(one.stored.path).rpartition("/")[0] for one in self._found} - {run}):
            raise InputError(f"{self._url} has copies of {1 + len(others)} runs", "one is meant", f"name it: {run}")
        if (free := shutil.disk_usage(path.parent).free) < size:
            cause = f"{format_bytes(free)} are free in {path.parent.parent}, where it is brought first"
            raise InputError(f"{copy.stored.path} has {format_bytes(size)}", cause, "make room, or name another OUT")
        path.mkdir()
        self._read(copy, path, True, alive)
        return path

    def _listed(self) -> list[_Copy]:
        if found := _copies(self._url, self._store):
            return found
        cause = "it is neither a copy of a checkpoint, nor of a run, nor a place with some"
        raise InputError(f"no checkpoint at {self._url}", cause, "name what checkpoint.copy_to names")

    def _require_key(self) -> None:
        if self._key is None and any(copy.suffix for copy in self._found):
            cause = "they are encrypted by a key that does not leave its machine"
            raise InputError(f"copies at {self._url} cannot be read", cause, "--client-key file:KEY")

    def _read(self, copy: _Copy, folder: Path, keeps: bool, alive: Callable[[int], object]) -> None:
        """Read one whole.

        Raises:
            CheckpointError: it cannot be used.
            InputError: the store does not answer, or the disk takes no more.
        """
        if self._key and not copy.suffix:
            cause = "it is not encrypted, and a key was given: a run with that key does not take it"
            raise WrongKey(f"{copy.stored.path} cannot be used", cause, "leave --client-key out")
        content = _Content(self._store, copy, self._key, keeps, alive)
        try:
            with (folder / MANIFEST).open("wb") as manifest:
                content.write(MANIFEST, manifest)
            position = verify_checkpoint(folder, content.hashes)
        except FileNotFoundError as error:
            raise DamagedError(f"{copy.stored.path} is damaged", f"{error.filename} is missing", _EARLIER) from None
        except WrongKey as error:
            raise WrongKey(error.what, error.cause, "--client-key file:KEY, with the run's own") from None
        except CheckpointError as error:
            if isinstance(error.__cause__, OSError):  # it could not be read, which says nothing of what is there
                raise self._cannot(copy, folder, keeps, error.__cause__) from None
            what = error.what.replace(str(folder), str(copy.stored.path))
            raise type(error)(what, error.cause, error.fix) from None
        except OSError as error:
            raise self._cannot(copy, folder, keeps, error) from None
        if position != copy.stored.position:
            cause = f"it is the checkpoint of epoch {position[0]}, step {position[1]}: another one was put in its place"
            raise DamagedError(f"{copy.stored.path} is damaged", cause, _EARLIER)

    def _cannot(self, copy: _Copy, folder: Path, keeps: bool, error: OSError) -> HotloopError:
        """Words for a store that does not let us read, or for a disk that does not take what was read."""
        if isinstance(error, _StoreError):
            return refused(str(copy.stored.path), error)
        return cannot_write(folder.parent.parent if keeps else folder.parent, error, InputError, "name another OUT")


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
