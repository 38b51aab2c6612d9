"""Images in object storage, some of which are kept on the local disk: S3 and what speaks its protocol, and others.

Credentials and the endpoint are those of the environment (`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL`, ...), or the
machine's role; none of them goes anywhere else.
"""

import hashlib
import io
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotloop.core.errors import HotloopError, InputError
from hotloop.data.object_cache import keep, open_cache, read_kept
from hotloop.data.object_store import obstore_module, open_store, reason, refused

_AT_ONCE = 16
"""Questions to a store at the same time."""
_RETRIES = 1000
"""Of reading an object: more than a minute has room for, so that a store may be started anew meanwhile."""


@dataclass(frozen=True)
class Object:
    """An object in a store: its name there, bytes, and a text that changes with its content."""

    name: str
    size: int
    state: str


@dataclass(frozen=True)
class Remote:
    """A place in object storage.

    What is kept on the disk is settled by the names of objects: as large a share of them as there is room for, the same
    in all processes and epochs. Of data that is read in another order each epoch no other rule has more hits.

    Attributes:
        url: the place.
        kept: the folder of what is kept; empty if nothing is.
        share: of the objects that are kept, 0 to 1.
    """

    url: str
    kept: str = ""
    share: float = 0.0

    def read(self, name: str, start: int = 0, size: int | None = None) -> bytes:
        """An object's bytes, or those from `start` on. About 1 ms beside the store.

        Raises:
            FileNotFoundError: there is no such object.
            EOFError: it ends before.
            HotloopError: the store does not give it, after retries for a minute.
        """
        file = self._file(f"{name} {start} {size}")
        if file and (content := read_kept(file)) is not None:
            return content
        content = _fetch(self.url, name, start, size)
        if file:
            keep(file, content)
        return content

    def open(self, name: str, size: int) -> io.BufferedReader:
        """An object of that size as a file, read in pieces of 64 KiB."""
        return io.BufferedReader(_Raw(self.url, name, size), 1 << 16)

    def _file(self, part: str) -> Path | None:
        digest = hashlib.sha256(part.encode(errors="surrogateescape")).digest()
        if not self.kept or int.from_bytes(digest[:4]) >= self.share * 2**32:
            return None
        return Path(self.kept, digest[4:5].hex(), digest.hex())


def list_objects(url: str) -> list[Object]:
    """All that lies at a place. About 0.1 s a thousand.

    Raises:
        InputError: obstore is not installed, or the store refuses or does not answer.
    """
    obstore = obstore_module()
    try:
        return [_object(each) for page in obstore.list(open_store(url), chunk_size=1000) for each in page]
    except obstore.exceptions.InvalidPathError as error:
        cause = "names with empty parts, dots alone or control characters cannot be listed"
        raise InputError(f"{url}: {reason(error)}", cause, "rename that object, or name a folder without it") from None
    except (obstore.exceptions.BaseError, OSError) as error:
        raise refused(url, error) from None


def find_objects(url: str, names: Sequence[str]) -> list[Object]:
    """These objects at a place, without those that are not there.

    Raises:
        InputError: as `list_objects`.
    """
    obstore, store = obstore_module(), open_store(url)

    def find(name: str) -> Object | None:
        try:
            return _object(obstore.head(store, name))
        except FileNotFoundError:
            return None
        except (obstore.exceptions.BaseError, OSError) as error:
            raise refused(url, error) from None

    with ThreadPoolExecutor(_AT_ONCE, "hotloop-objects") as pool:
        return [found for found in pool.map(find, names) if found]


def keep_on_disk(url: str, objects: Sequence[Object], most_bytes: float) -> Remote:
    """The place with as much of it kept on the local disk as `most_bytes` and the disk allow."""
    states = "\n".join(sorted(f"{each.name} {each.state}" for each in objects))
    digest = hashlib.sha256(f"{store_key(url)}\n{states}".encode(errors="surrogateescape")).hexdigest()[:32]
    return Remote(url, *open_cache(digest, sum(each.size for each in objects), most_bytes))


def _object(found: Any) -> Object:
    return Object(found["path"], found["size"], f"{found['e_tag'] or found['last_modified']} {found['size']}")


def store_key(url: str) -> str:
    """A place, and the store that it is in."""
    return f"{os.environ.get('AWS_ENDPOINT_URL', '')} {url}"


class _Raw(io.RawIOBase):
    def __init__(self, url: str, name: str, size: int) -> None:
        self._url, self._name, self._size, self._at = url, name, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), self._size - self._at)
        if wanted <= 0:
            return 0
        content = _fetch(self._url, self._name, self._at, wanted)
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)


def _fetch(url: str, name: str, start: int, size: int | None) -> bytes:
    obstore = obstore_module()
    try:
        store = open_store(url, _RETRIES)
        if size is None:
            return bytes(obstore.get(store, name).bytes())
        content = bytes(obstore.get_range(store, name, start=start, length=size)) if size else b""
    except FileNotFoundError:
        raise
    except obstore.exceptions.BaseError as error:
        if size is not None and _is_shorter(url, name, start + size):
            raise EOFError(name) from None
        fix = "see whether the store answers, and start again: a run continues where it was"
        raise HotloopError(f"{url}/{name} cannot be read", reason(error), fix) from None
    if len(content) < size:
        raise EOFError(name)
    return content


def _is_shorter(url: str, name: str, end: int) -> bool:
    try:
        return int(obstore_module().head(open_store(url), name)["size"]) < end
    except Exception:  # the store does not answer: what it said before is told
        return False
