"""Whether an image should be built anew: newer patches, known vulnerabilities, age."""

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from hotloop.core.errors import HotloopError
from hotloop.image.advisories import Advisory
from hotloop.image.lock import Locked
from hotloop.versions.table import Table

_LIMIT_SECONDS = 120.0


@dataclass(frozen=True)
class Newer:
    """A package of which there is a newer patch: the same first two numbers."""

    package: str
    version: str
    newest: str


@dataclass(frozen=True)
class Plan:
    """Whether rebuilding is due, and why.

    Attributes:
        reasons: in a line each; none if it is not due.
    """

    newer: tuple[Newer, ...]
    advisories: tuple[Advisory, ...]
    reasons: tuple[str, ...]

    @property
    def due(self) -> bool:
        return bool(self.reasons)


def newer_patches(
    packages: Sequence[Locked], table: Table, versions_of: Callable[[str], Sequence[str]] | None
) -> tuple[Newer, ...]:
    """Packages of which there is a newer patch.

    Args:
        versions_of: what an index has of a package; None to ask the versions table alone, which knows torch.
    """
    torch = next((Version(one.version) for one in packages if canonicalize_name(one.name) == "torch"), Version("0"))
    alike = [build for build in table.builds if Version(build.torch).release[:2] == torch.release[:2]]
    found = []
    for one in packages:
        name = canonicalize_name(one.name)
        listed = [build.torch for build in alike] if name == "torch" else []
        if name == "torchvision":  # its patches are each for one torch, which the table knows and an index does not
            listed = [build.torchvision for build in alike]
        elif versions_of:
            listed += versions_of(name)
        own = Version(one.version)
        same = [version for text in listed if (version := _version(text)) and version.release[:2] == own.release[:2]]
        newest = max((one for one in same if not one.is_prerelease), default=own)
        if newest.release > own.release:
            found.append(Newer(one.name, one.version, str(newest)))
    return tuple(found)


def plan(newer: tuple[Newer, ...], advisories: tuple[Advisory, ...], age_days: float | None, most_days: int) -> Plan:
    """What makes rebuilding due: a vulnerability that is fixed, a newer patch of torch, or its age.

    The distribution's own packages get their fixes by rebuilding only; the age stands for them.
    """
    reasons = [
        f"{one.package} {one.version} has {one.id}, fixed in {one.fixed}: {one.summary}"
        for one in advisories
        if one.fixed
    ]
    reasons += [f"torch {one.version} has the patch {one.newest}" for one in newer if one.package == "torch"]
    if age_days is not None and age_days > most_days:
        reasons.append(f"it is {age_days:.0f} days old, more than {most_days}: the distribution's fixes are not in it")
    return Plan(newer, advisories, tuple(reasons))


def index_versions(package: str) -> list[str]:
    """What pip's index has of a package.

    Raises:
        HotloopError: pip is not there, or reaches no index.
    """
    command = [sys.executable, "-m", "pip", "index", "versions", package]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_SECONDS)  # noqa: S603 - pip
    except subprocess.TimeoutExpired:
        what = f"pip took longer than {_LIMIT_SECONDS:.0f} s"
        raise HotloopError(what, f"pip index versions {package}", f"{sys.executable} -m pip config list") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        fix = f"{sys.executable} -m pip config list, or leave --index out"
        raise HotloopError(f"pip index versions {package} failed", last, fix)
    listed = re.search(r"Available versions: (.*)", done.stdout)
    return listed[1].split(", ") if listed else []


def _version(text: str) -> Version | None:
    try:
        return Version(text)
    except InvalidVersion:
        return None
