"""Known vulnerabilities of packages, from a database in OSV's format that lies on this machine."""

import json
import shutil
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from hotloop.core.errors import HotloopError, InputError
from hotloop.core.files import user_cache
from hotloop.image.lock import Locked

SOURCE = "https://osv-vulnerabilities.storage.googleapis.com/PyPI/all.zip"
"""OSV's own export of all advisories about Python packages, a JSON file each."""
_LIMIT_SECONDS = 120.0


@dataclass(frozen=True)
class Advisory:
    """A vulnerability of a package that is in the image.

    Attributes:
        fixed: the least version above the image's own that is not affected; empty if there is none.
    """

    id: str
    aliases: tuple[str, ...]
    package: str
    version: str
    summary: str
    fixed: str


def database() -> Path | None:
    """Where `refresh` keeps it; None for a user without a home."""
    cache = user_cache()
    return cache / "osv-pypi.zip" if cache else None


def refresh(source: str, file: Path) -> int:
    """Fetch the database; the older one stands until the new one is whole and can be read.

    Args:
        source: an address, or a file.

    Returns:
        how many advisories it has.

    Raises:
        HotloopError: it cannot be fetched, or is something else.
    """
    temporary = file.with_name(f".{file.name}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if "://" in source:
            with urllib.request.urlopen(source, timeout=_LIMIT_SECONDS) as answer, temporary.open("wb") as written:  # noqa: S310
                shutil.copyfileobj(answer, written)
        else:
            shutil.copyfile(source, temporary)
        found = sum(1 for _ in _records(temporary))
        temporary.replace(file)
    except (OSError, ValueError, urllib.error.URLError, zipfile.BadZipFile) as error:
        temporary.unlink(missing_ok=True)
        fix = "--source ADDRESS or FILE of an export in OSV's format: a ZIP of JSON files"
        raise HotloopError(f"no advisories from {source}", str(error), fix) from None
    return found


def affecting(packages: Sequence[Locked], file: Path) -> tuple[Advisory, ...]:
    """Advisories about packages in the versions that they have, by package.

    Args:
        file: the database: a ZIP of JSON files, or a file with one JSON object a line.

    Raises:
        InputError: it is not there, or is something else.
    """
    by_name = {canonicalize_name(one.name): one for one in packages}
    found = []
    try:
        for record in _records(file):
            if record.get("withdrawn"):
                continue
            for affected in record.get("affected") or ():
                named = affected.get("package") or {}
                package = by_name.get(canonicalize_name(named.get("name", "")))
                if package and named.get("ecosystem") == "PyPI" and is_affected(package.version, affected):
                    found.append(_advisory(record, affected, package))
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        fix = "hotloop image advisories fetches them; --advisories FILE names a file"
        raise InputError(f"cannot read advisories in {file}", str(error), fix) from None
    return tuple(sorted(set(found), key=lambda one: (one.package, one.id)))


def is_affected(version: str, affected: dict[str, Any]) -> bool:
    """Whether a version is among those that an advisory lists, or within its ranges."""
    if version in (affected.get("versions") or ()):
        return True
    return any(_within(version, events) for events in _ranges(affected))


def _within(version: str, events: Sequence[dict[str, str]]) -> bool:
    """OSV's rule: affected if the last event at or below the version introduces it."""
    own, inside = _version(version), False
    ordered = sorted(events, key=lambda event: (_version(_bound(event)), "introduced" not in event))
    for event in ordered:
        bound = _version(_bound(event))
        if "introduced" in event and bound <= own:
            inside = True
        if ("fixed" in event and bound <= own) or ("last_affected" in event and bound < own):
            inside = False
    return inside


def _bound(event: dict[str, str]) -> str:
    return event.get("introduced") or event.get("fixed") or event.get("last_affected") or "0"


def _ranges(affected: dict[str, Any]) -> list[list[dict[str, str]]]:
    """Ranges of versions; others are of commits."""
    return [one.get("events") or [] for one in affected.get("ranges") or () if one.get("type") == "ECOSYSTEM"]


def _advisory(record: dict[str, Any], affected: dict[str, Any], package: Locked) -> Advisory:
    fixes = [event["fixed"] for events in _ranges(affected) for event in events if "fixed" in event]
    later = sorted((text for text in fixes if _version(text) > _version(package.version)), key=_version)
    summary = record.get("summary") or (record.get("details") or "").strip().split("\n")[0]
    aliases = tuple(record.get("aliases") or ())
    return Advisory(record["id"], aliases, package.name, package.version, summary[:200], later[0] if later else "")


def _version(text: str) -> Version:
    """One that is none, as a few advisories have, lies below all."""
    try:
        return Version(text)
    except InvalidVersion:
        return Version("0.dev0")


def _records(file: Path) -> Iterator[dict[str, Any]]:
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            for name in archive.namelist():
                if name.endswith(".json"):
                    yield json.loads(archive.read(name))
        return
    with file.open() as lines:
        for line in lines:
            if line.strip():
                record = json.loads(line)
                if not isinstance(record, dict) or "id" not in record:
                    raise ValueError("a line of it is no advisory")
                yield record
