"""Which copies of checkpoints there are in object storage, and whether they are whole. Nothing of them is kept."""

import errno
import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hotloop.core.errors import CheckpointError, InputError
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
    """What is written to it is hashed and counted."""

    def __init__(self) -> None:
        self._sha256, self._size = hashlib.sha256(), 0

    def write(self, content: bytes) -> int:
        self._sha256.update(content)
        self._size += len(content)
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
    """The files of one copy, decrypted."""

    def __init__(self, store: Any, copy: _Copy, key: ClientKey | None) -> None:
        self._store, self._copy, self._key = store, copy, key

    def write(self, name: str, target: Writes) -> None:
        with closing(_Object(self._store, f"{self._copy.below}{name}{self._copy.suffix}")) as source:
            if self._copy.suffix and self._key:
                self._key.decrypt_stream(source, target, name)
            else:
                while piece := source.read(_PIECE_BYTES):
                    target.write(piece)

    def hashes(self, _: Path, names: Sequence[str]) -> dict[str, Any]:
        """As `hash_files`, of what the store has."""
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return dict(zip(names, pool.map(self._described, names), strict=True))

    def _described(self, name: str) -> dict[str, Any]:
        digest = _Digest()
        self.write(name, digest)
        return digest.described()


def copied_checkpoints(url: str, verify: bool = False, client_key: str = "") -> list[Stored]:
    """The copies of a run, of all runs below a place, or the one that this is; of each run oldest first.

    One whose manifest has not come yet is none.

    Args:
        verify: read each whole, and compare it with its hash; nothing of it is written to the disk.
        client_key: `storage.client_key` of the job, for copies that are encrypted by it.

    Raises:
        InputError: there is none, the store does not answer, or a key is needed that is not given.
    """
    if not is_remote(url):
        raise InputError(f"{url} is no place in object storage", "s3://, gs:// and az:// are", "s3://bucket/folder")
    url, store = url.rstrip("/"), open_store(url.rstrip("/"), patience=_PATIENCE)
    key = ClientKey(client_key) if client_key else None
    found = _copies(url, store)
    if not found:
        cause = "it is neither a copy of a checkpoint, nor of a run, nor a place with some"
        raise InputError(f"no checkpoint at {url}", cause, "name what checkpoint.copy_to names")
    if not verify:
        return [copy.stored for copy in found]
    if key is None and any(copy.suffix for copy in found):
        cause = "they are encrypted by a key that does not leave its machine"
        raise InputError(f"copies at {url} cannot be read", cause, "--client-key file:KEY")
    return [one for one in (_verified(url, store, copy, key) for copy in found) if one]


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


def _verified(url: str, store: Any, copy: _Copy, key: ClientKey | None) -> Stored | None:
    """None for one that a training has meanwhile removed, as it keeps the newest ones, or is sending again."""
    with TemporaryDirectory(prefix="hotloop-") as name:
        damage = _damage(_Content(store, copy, key), copy, Path(name), encrypted=key is not None)
    if damage and copy not in _copies(url, store):
        return None
    return replace(copy.stored, damage=damage)


def _damage(content: _Content, copy: _Copy, folder: Path, encrypted: bool) -> str:
    """Why a copy cannot be used; empty if it can.

    Raises:
        InputError: the store does not answer.
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
            raise refused(str(copy.stored.path), error.__cause__) from None
        return error.cause
    except OSError as error:
        raise refused(str(copy.stored.path), error) from None
    if position != copy.stored.position:
        return f"it is the checkpoint of epoch {position[0]}, step {position[1]}: another one was put in its place"
    return ""
