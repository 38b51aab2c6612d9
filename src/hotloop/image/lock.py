"""Every package with its version and hashes, solved by uv for the image's Python, not for this one."""

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from hotloop.core.errors import HotloopError, InputError
from hotloop.image.recipe import Recipe

_LIMIT_SECONDS = 600.0
_INSTALL = 'pip install "hotloop[image]", or pip install uv'


@dataclass(frozen=True)
class Locked:
    """A line of a lock file."""

    name: str
    version: str
    hashes: tuple[str, ...]


def lock(recipe: Recipe) -> dict[str, str]:
    """Lock files by name. They hold no address of an index.

    Raises:
        InputError: uv is not there.
        HotloopError: it finds no solution, or no index.
    """
    uv = find_uv()
    torch = ["--torch-backend", recipe.backend] if recipe.backend else []
    wheels = ["--only-binary", ":all:"]  # no code of packages runs here, and none is compiled in the image
    files = {"requirements.lock": _compiled(uv, recipe.requirements, recipe, [*wheels, *torch])}
    if recipe.backend:
        files["requirements-uv.lock"] = _compiled(uv, [f"uv=={_version(uv)}"], recipe, wheels)
    if recipe.options.extensions:
        files["extensions.lock"] = _compiled(uv, recipe.options.extensions, recipe, ["--no-deps"])
    return files


def find_uv() -> str:
    """Where uv is: beside this Python, or on the path."""
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if beside.is_file() else shutil.which("uv")
    if not found:
        raise InputError("there is no uv here", "it solves the image's packages and writes down their hashes", _INSTALL)
    return found


def read_lock(file: Path) -> tuple[Locked, ...]:
    """What a lock file holds.

    Raises:
        InputError: it cannot be read, or holds something else.
    """
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        fix = f"name {file}/requirements.lock" if file.is_dir() else "hotloop image render --output FOLDER"
        raise InputError(f"cannot read {file}", str(error), fix) from error
    found = parse_lock(text)
    if not found:
        fix = "hotloop image render --output FOLDER writes requirements.lock"
        raise InputError(f"{file} is no lock file", "no line of it has a name==version", fix)
    return found


def parse_lock(text: str) -> tuple[Locked, ...]:
    """Lines of `name==version` with what follows them; markers and comments are left out."""
    joined = re.sub(r"\\\n", " ", text)
    found = []
    for line in joined.splitlines():
        pinned = re.match(r"([A-Za-z0-9][\w.-]*)(?:\[[^\]]*\])?==([^\s;\\]+)", line)
        if pinned:
            found.append(Locked(pinned[1], pinned[2], tuple(re.findall(r"--hash=(\w+:[0-9a-f]+)", line))))
    return tuple(found)


def _compiled(uv: str, requirements: Sequence[str], recipe: Recipe, options: Sequence[str]) -> str:
    glibc = "2_17" if Version(recipe.build.glibc) < Version("2.28") else "2_28"
    command = [
        uv, "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--generate-hashes", "--no-emit-index-url",
        "--no-emit-find-links", "--python-version", recipe.base.python, "--python-platform",
        f"{recipe.build.processor}-manylinux_{_platform(recipe, glibc)}", *options, "-",
    ]  # fmt: skip
    try:
        done = subprocess.run(  # noqa: S603 - uv
            command, input="\n".join(requirements), capture_output=True, text=True, timeout=_LIMIT_SECONDS
        )
    except subprocess.TimeoutExpired:
        what = f"uv took longer than {_LIMIT_SECONDS:.0f} s"
        raise HotloopError(what, "its index does not answer", "UV_DEFAULT_INDEX names the index") from None
    if done.returncode:
        said = " ".join(done.stderr.split()) or "uv said nothing"
        fix = "another --package or --torch; what has no wheel is an --extension; UV_DEFAULT_INDEX names the index"
        raise HotloopError("uv finds no packages for this image", said[:600], fix)
    return done.stdout


def _platform(recipe: Recipe, glibc: str) -> str:
    """Wheels of other packages may ask for a newer C library than torch's do; the base's is known."""
    return glibc if not recipe.base.glibc else f"2_{min(int(recipe.base.glibc.split('.')[1]), 40)}"


def _version(uv: str) -> str:
    said = subprocess.run([uv, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout  # noqa: S603
    return said.split()[1]
