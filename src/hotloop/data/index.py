"""What a scan of many files found, kept in the user's cache until something changes."""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hotloop.core.files import new_directory, write_atomic
from hotloop.data.columns import Column, Texts

_FROM = 10_000
"""Files from which an index is written; fewer are found again in milliseconds."""
_SETTLED_NS = 2 * 10**9
"""Nanoseconds that a folder must have been left alone before the scan: its time of change may be as coarse as that."""
_KEPT_SECONDS = 24 * 3600.0
"""How long an index that is no longer the newest stays, for runs that began with it."""


@dataclass(frozen=True)
class Listing:
    """Files and their class.

    Attributes:
        names: of the files, relative to one place, in order.
        labels: int32, counting into `classes`.
        classes: in order of name.
        watched: folders and files whose change would change the listing, and their state.
    """

    names: Texts
    labels: Column
    classes: tuple[str, ...]
    watched: Mapping[str, int]

    def digest(self) -> str:
        """Hash over names, labels and classes."""
        digest = hashlib.sha256(json.dumps(self.classes).encode())
        for column in (self.names.characters, self.names.ends, self.labels):
            digest.update(column.array.tobytes())
        return digest.hexdigest()


def state_of(path: str) -> int:
    """Changes when a folder's entries do, or a file's content. Nanoseconds."""
    return os.stat(path).st_mtime_ns


def indexed(location: Path, scan: Callable[[], Listing], cache: Path | None = None) -> Listing:
    """The listing of a folder or list: from the index if nothing has changed, or by a scan, whose result is kept.

    A folder's state is the time of its last change: a file that is replaced by another of the same name changes
    nothing. Warm, a million files in a thousand folders take some milliseconds.

    Args:
        cache: where indices are; by default the user's cache folder. Where it cannot be written nothing is kept.
    """
    folder = (cache or _cache()) / hashlib.sha256(os.fsencode(location.resolve())).hexdigest()[:32]
    if found := _read(folder):
        return found
    started = time.time_ns()
    listing = scan()
    settled = max(listing.watched.values(), default=0) < started - _SETTLED_NS
    if len(listing.names) >= _FROM and settled:
        with suppress(OSError):
            return _write(folder, listing)
    return listing


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hotloop" / "index"


def _read(folder: Path) -> Listing | None:
    try:
        newest = json.loads((folder / "newest.json").read_bytes())
        if any(state_of(path) != state for path, state in newest["watched"].items()):
            return None
        return _open(folder / newest["digest"], newest)
    except (OSError, ValueError, KeyError, EOFError):  # there is none, something watched is gone, or it is damaged
        return None


def _open(columns: Path, newest: Mapping[str, object]) -> Listing:
    characters, ends, labels = (Column.open(str(columns / f"{name}.npy")) for name in _COLUMNS)
    classes, watched = newest["classes"], newest["watched"]
    assert isinstance(classes, list)
    assert isinstance(watched, dict)
    return Listing(Texts(characters, ends), labels, tuple(classes), watched)


def _write(folder: Path, listing: Listing) -> Listing:
    folder.mkdir(parents=True, exist_ok=True)
    newest = {"digest": listing.digest(), "classes": listing.classes, "watched": dict(listing.watched)}
    columns = folder / str(newest["digest"])
    with new_directory(columns) as temporary:
        for name, column in zip(_COLUMNS, (listing.names.characters, listing.names.ends, listing.labels), strict=True):
            column.write(temporary / f"{name}.npy")
    write_atomic(folder / "newest.json", json.dumps(newest))
    for other in folder.iterdir():
        if other.is_dir() and other != columns and time.time() - other.stat().st_mtime > _KEPT_SECONDS:
            shutil.rmtree(other, ignore_errors=True)
    return _open(columns, json.loads(json.dumps(newest)))


_COLUMNS = ("characters", "ends", "labels")
