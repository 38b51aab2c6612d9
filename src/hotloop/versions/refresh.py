"""New versions of torch for the table, from the metadata of the wheels that pip finds."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

from hotloop.core.errors import HotloopError
from hotloop.versions.table import Build, Table

_LIMIT_SECONDS = 300.0
_TAGS = {"x86_64": ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux1_x86_64")}
_UNCONSTRAINED = {"PIP_CONSTRAINT": os.devnull}
"""What may be installed here limits what is installed, not what there is. pip takes an empty value as none given."""
_NEWEST_PYTHON = 30
"""No wheel is asked for beyond Python 3.30."""


def refresh(table: Table, progress: Callable[[str], None]) -> Table:
    """The table with the versions of torch that it does not have, for x86_64.

    Which cards a wheel holds code for is not in its metadata: it is taken from the newest build with the same CUDA, and
    the row says so.

    Args:
        progress: told of each version, in a line; each takes up to a minute.

    Raises:
        HotloopError: pip is not there, or finds nothing.
    """
    known = {Version(build.torch) for build in table.builds}
    new = [one for one in _versions("torch") if one > min(known) and one not in known and not one.is_prerelease]
    found = []
    for version in sorted(new):
        build = _build(version, table)
        progress(f"torch {version}" if build else f"torch {version}: left out, the table has no build for its CUDA")
        found += [build] if build else []
    if not found:
        return table
    builds = sorted([*found, *table.builds], key=lambda build: Version(build.torch), reverse=True)
    return replace(table, builds=tuple(builds), date=datetime.now(UTC).date().isoformat())


def written(table: Table) -> str:
    """A table as `read_table` takes it."""
    raw = asdict(table)
    for row in raw["builds"]:
        row.update(binaries=_texts(row["binaries"]), ptx=_texts(row["ptx"]))
    for row in raw["architectures"]:
        row["capabilities"] = _texts(row["capabilities"])
    raw["cards"] = {name: ".".join(map(str, capability)) for name, capability in table.cards.items()}
    raw["cudas"] = list(raw["cudas"].values())
    return json.dumps(raw, indent=1)


def _texts(capabilities: Iterable[tuple[int, int]]) -> list[str]:
    return [f"{major}.{minor}" for major, minor in capabilities]


def _build(version: Version, table: Table) -> Build | None:
    """Its default build; None if its CUDA is not in the table."""
    wheel = _wheel("torch", version, None)
    pins = {pin.name: _pinned(pin) for pin in map(Requirement, wheel["metadata"].get("requires_dist", []))}
    named = {re.sub(r"-cu\d+$", "", name): pin for name, pin in pins.items() if pin}
    cuda = ".".join(named.get("cuda-toolkit", named.get("nvidia-cuda-runtime", "")).split(".")[:2])
    alike = next((build for build in table.builds if build.cuda == cuda and build.processor == "x86_64"), None)
    if alike is None:
        return None
    first = int(re.findall(r">=\s*3\.(\d+)", wheel["metadata"]["requires_python"])[0])
    here = max(first, sys.version_info.minor)
    last = next(minor for minor in range(here, _NEWEST_PYTHON) if not _has(version, minor + 1))
    return replace(
        alike,
        torch=str(version),
        default=True,
        pythons=(first, last),
        torchvision=_torchvision(version),
        cudnn=named.get("nvidia-cudnn", ""),
        nccl=named.get("nvidia-nccl", ""),
        triton=named.get("triton", ""),
        glibc="2.28" if "manylinux_2_28" in wheel["download_info"]["url"] else "2.17",
        source=f"metadata of its wheel; code for cards as of torch {alike.torch}",
        note="",
    )


def _pinned(requirement: Requirement) -> str:
    return next((one.version for one in requirement.specifier if one.operator in ("==", "~=")), "")


def _torchvision(version: Version) -> str:
    """The newest that asks for this torch."""
    for candidate in sorted(_versions("torchvision"), reverse=True):
        wheel = _wheel("torchvision", candidate, None)
        for requirement in map(Requirement, wheel["metadata"].get("requires_dist", [])):
            if requirement.name == "torch" and requirement.specifier and version in requirement.specifier:
                return str(candidate)
    return ""


def _has(version: Version, minor: int) -> bool:
    try:
        _wheel("torch", version, minor)
    except HotloopError:
        return False
    return True


def _versions(package: str) -> list[Version]:
    listed = re.search(r"Available versions: (.*)", _pip("index", "versions", package))
    return [Version(text) for text in listed[1].split(", ") if "+" not in text] if listed else []


def _wheel(package: str, version: Version, minor: int | None) -> dict[str, Any]:
    """What pip would install, with its metadata; nothing is installed."""
    options = [word for tag in _TAGS["x86_64"] for word in ("--platform", tag)]
    python = ["--python-version", f"3.{minor or sys.version_info.minor}"]
    said = _pip("install", "--dry-run", "--no-deps", "--ignore-installed", "--only-binary", ":all:", "--report", "-",
                "--target", "nowhere", *options, *python, f"{package}==={version}")  # fmt: skip
    wheel: dict[str, Any] = json.loads(said)["install"][0]
    return wheel


def _pip(*arguments: str) -> str:
    quiet = ["--quiet"] if arguments[0] == "install" else []  # else nothing at all is said of an index
    command = [sys.executable, "-m", "pip", *arguments, *quiet]
    try:
        done = subprocess.run(  # noqa: S603 - pip
            command, capture_output=True, text=True, timeout=_LIMIT_SECONDS, env={**os.environ, **_UNCONSTRAINED}
        )
    except subprocess.TimeoutExpired:
        what = f"pip took longer than {_LIMIT_SECONDS:.0f} s"
        raise HotloopError(what, " ".join(arguments[:3]), f"{sys.executable} -m pip config list") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise HotloopError(f"pip {arguments[0]} {arguments[-1]} failed", last, f"{sys.executable} -m pip config list")
    return done.stdout
