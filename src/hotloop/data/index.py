"""What a scan of many files found, kept in the user's cache until something changes."""

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hotloop.core.files import new_directory, state_of, user_cache, write_atomic
from hotloop.data.columns import Column, Texts
from hotloop.data.listing import Listing, Spans

_FROM = 10_000
"""Files from which an index is written; fewer are found again in milliseconds. Of shards it is always written."""
_SETTLED_NS = 2 * 10**9
"""Nanoseconds that a folder must have been left alone before the scan: its time of change may be as coarse as that."""
_KEY = "7 "
"""Another one for other rules of what is found."""
_KEPT_SECONDS = 24 * 3600.0
"""How long an index that is no longer the newest stays, for runs that began with it."""


def indexed(
    location: Path, scan: Callable[[], Listing], cache: Path | None = None, states: Mapping[str, str] | None = None
) -> Listing:
    """The listing of a folder or list: from the index if nothing has changed, or by a scan, whose result is kept.

    A folder's state is the time of its last change: a file that is replaced by another of the same name changes
    nothing. Warm, a million files in a thousand folders take some milliseconds.

    Args:
        cache: in which the indices' folder is; by default the user's. Where it cannot be written nothing is kept.
        states: of all that the listing depends on, if that is not on a disk.
    """
    if not (home := cache or user_cache()):
        return scan()
    folder = home / "index" / hashlib.sha256(os.fsencode(_KEY + os.path.abspath(location))).hexdigest()[:32]
    with suppress(Exception):  # there is none, something watched is gone, or it is damaged: found anew
        return _read(folder, states)
    started = time.time_ns()
    listing = scan()
    changes = [int(state.split()[0]) for state in listing.watched.values()] if states is None else []
    settled = max(changes, default=0) < started - _SETTLED_NS
    if (len(listing.names) >= _FROM or listing.spans) and settled:
        with suppress(OSError):
            return _write(folder, listing)
    return listing


def _read(folder: Path, states: Mapping[str, str] | None) -> Listing:
    newest = json.loads((folder / "newest.json").read_bytes())
    watched = newest["watched"]
    now = {path: state_of(path) for path in watched} if states is None else states
    if now != watched:
        raise ValueError("something has changed")
    return _open(folder / newest["digest"], newest)


def _open(columns: Path, newest: Mapping[str, Any]) -> Listing:
    def column(name: str) -> Column:
        return Column.open(str(columns / f"{name}.npy"))

    spans = Spans(column("places"), tuple(newest["shards"])) if newest["shards"] else None
    names = Texts(column("characters"), column("ends"))
    return Listing(names, column("labels"), tuple(newest["classes"]), newest["watched"], spans)


def _write(folder: Path, listing: Listing) -> Listing:
    """One process at a time: the ranks of a job and the runs of a sweep begin together, and find the same."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _write_alone(folder, listing)


def _write_alone(folder: Path, listing: Listing) -> Listing:
    newest: dict[str, Any] = {
        "digest": listing.digest(),
        "classes": listing.classes,
        "watched": dict(listing.watched),
        "shards": listing.spans.shards if listing.spans else (),
    }
    columns = folder / str(newest["digest"])
    kept = {"characters": listing.names.characters, "ends": listing.names.ends, "labels": listing.labels}
    if listing.spans:
        kept["places"] = listing.spans.places
    try:
        _open(columns, newest)  # the same was found before, and others may be reading it
    except (OSError, ValueError, EOFError):
        with new_directory(columns) as temporary:
            for name, column in kept.items():
                column.write(temporary / f"{name}.npy")
    with suppress(Exception):  # there is none before it, or a damaged one
        os.utime(
            folder / json.loads((folder / "newest.json").read_bytes())["digest"]
        )  # from now on it is not the newest
    now = time.time()
    for other in folder.iterdir():
        if other.is_dir() and other != columns and now - other.stat().st_mtime > _KEPT_SECONDS:
            shutil.rmtree(other, ignore_errors=True)
    write_atomic(folder / "newest.json", json.dumps(newest))
    return _open(columns, newest)
