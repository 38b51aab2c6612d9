"""Images in object storage, some of which are kept on the local disk: S3 and what speaks its protocol, and others.

Credentials and the endpoint are those of the environment (`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL`, ...), or the
machine's role; none of them goes anywhere else.
"""

import hashlib
import io
import os
import shutil
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

from hotloop.core.errors import HotloopError, InputError
from hotloop.core.files import user_cache

_SCHEMES = ("s3", "gs", "az")
_CONNECT_SECONDS, _ANSWER_SECONDS, _RETRY_SECONDS = 5, 30, 60
_SPARED = 0.2
"""Of the free disk, which is left free."""
_CHECKSUM_BYTES = 4


def is_remote(location: str) -> bool:
    """Whether a location is in object storage."""
    scheme, separator, _ = location.partition("://")
    return bool(separator) and scheme in _SCHEMES


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
        """An object's bytes, or those from `start` on. About 1 ms beside the store, two round trips at the first.

        Raises:
            FileNotFoundError: there is no such object.
            HotloopError: the store does not give it, after retries for a minute.
        """
        file = self._file(f"{name} {start} {size}")
        if file and (content := _checked(file)) is not None:
            return content
        content = _fetch(self.url, name, start, size)
        if file:
            _keep(file, content)
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
    """All that lies at a place, by name. About 0.1 s a thousand.

    Raises:
        InputError: obstore is not installed, or the store refuses or does not answer.
    """
    store, errors = _store(url), _obstore().exceptions
    try:
        pages = _obstore().list(store, chunk_size=1000)
        found = [
            Object(each["path"], each["size"], f"{each['e_tag']} {each['size']}") for page in pages for each in page
        ]
    except (errors.BaseError, OSError) as error:
        raise _refused(url, error) from None
    return sorted(found, key=lambda each: each.name)


def keep_on_disk(url: str, objects: Sequence[Object], most_bytes: float) -> Remote:
    """The place with as much of it kept on the local disk as `most_bytes` and the free disk allow.

    What is kept of other data goes, the least recently used first, where both are more than `most_bytes`.
    """
    cache, total = user_cache(), sum(each.size for each in objects)
    if not cache or not most_bytes or not total:
        return Remote(url)
    states = "\n".join(f"{each.name} {each.state}" for each in objects)
    folder = cache / "objects" / hashlib.sha256(f"{url}\n{states}".encode(errors="surrogateescape")).hexdigest()[:32]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)
        _make_room(folder, most_bytes - min(most_bytes, total))
        there = _folder_bytes(folder)
        room = min(most_bytes, there + (1 - _SPARED) * shutil.disk_usage(folder).free)
    except OSError:  # no disk to write to
        return Remote(url)
    return Remote(url, str(folder), min(1.0, room / total))


def _make_room(folder: Path, for_others: float) -> None:
    others = sorted((each for each in folder.parent.iterdir() if each != folder), key=lambda each: each.stat().st_mtime)
    sizes = {other: _folder_bytes(other) for other in others}
    for other in others:
        if sum(sizes.values()) <= for_others:
            return
        shutil.rmtree(other, ignore_errors=True)
        del sizes[other]


def _folder_bytes(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # another process has just removed it
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def _checked(file: Path) -> bytes | None:
    """What was kept; None if it is not there or damaged."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    content, checksum = content[:-_CHECKSUM_BYTES], content[-_CHECKSUM_BYTES:]
    return content if zlib.crc32(content).to_bytes(_CHECKSUM_BYTES) == checksum else None


def _keep(file: Path, content: bytes) -> None:
    temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content + zlib.crc32(content).to_bytes(_CHECKSUM_BYTES))
        temporary.replace(file)
    except OSError:  # the disk is full, or it was taken away: the store has it still
        temporary.unlink(missing_ok=True)


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
    obstore = _obstore()
    try:
        if size is None:
            return bytes(obstore.get(_store(url), name).bytes())
        return bytes(obstore.get_range(_store(url), name, start=start, length=size)) if size else b""
    except FileNotFoundError:
        raise
    except obstore.exceptions.BaseError as error:
        fix = "see whether the store answers, and start again: a run continues where it was"
        raise HotloopError(f"{url}/{name} cannot be read", _first_line(error), fix) from None


@lru_cache(maxsize=16)
def _store(url: str) -> Any:
    """Opened once a process: processes of ours are spawned, never forked, which its threads would not survive."""
    retry = {"max_retries": 8, "retry_timeout": timedelta(seconds=_RETRY_SECONDS)}
    client = {
        "connect_timeout": f"{_CONNECT_SECONDS}s",
        "timeout": f"{_ANSWER_SECONDS}s",
        "allow_http": os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true"),
    }
    try:
        return _obstore().store.from_url(url, client_options=client, retry_config=retry)
    except (_obstore().exceptions.BaseError, ValueError) as error:
        raise _refused(url, error) from None


def _obstore() -> Any:
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError:
        what = "object storage is read by obstore"
        raise InputError(what, "it is not installed", "pip install 'hotloop[s3]'") from None
    return obstore


def _refused(url: str, error: Exception) -> InputError:
    cause = _first_line(error)
    plain = os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://")
    fix = "set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION; AWS_ENDPOINT_URL for a store of your own"
    fix += ", and AWS_ALLOW_HTTP=true if it has no TLS" if plain else ""
    return InputError(f"{url} cannot be listed", cause, fix)


def _first_line(error: Exception) -> str:
    return next(iter(_lines(error)), type(error).__name__)


def _lines(error: Exception) -> Iterator[str]:
    return (line.strip() for line in str(error).splitlines() if line.strip())
