"""From wishes to a recipe: which base, which torch, which packages."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from typing import Literal, get_args

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import Version

from hotloop import __version__
from hotloop.core.errors import HotloopError, InputError
from hotloop.image.bases import Base, Toolkit, known_bases, known_toolkits, own_base
from hotloop.versions.solve import Solution, Wish, solve
from hotloop.versions.table import Build, Table

Profile = Literal["train", "develop", "serve"]
PROFILES: tuple[Profile, ...] = get_args(Profile)

PARTS = ("dali", "exporter", "gpu-decode", "nvimagecodec", "tensorboard")
"""What --with adds."""

OLDEST_PYTHON = Version("3.11")

NUMPY_2 = Version("2.3")
"""The first torch whose wheels take numpy 2."""


@dataclass(frozen=True)
class Options:
    """What is wanted of an image, beside versions.

    Attributes:
        base: a name of the table, or an image; empty for whichever fits.
        packages: more requirements, as pip takes them.
        extensions: requirements that are compiled against torch and CUDA: "flash-attn==2.8.3".
        timestamp: seconds since 1970, of the label and of all files.
        source: address of what the image is made from, for its label.
    """

    profile: Profile = "train"
    base: str = ""
    parts: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    extensions: tuple[str, ...] = ()
    timestamp: int = 0
    source: str = ""


@dataclass(frozen=True)
class Recipe:
    """Everything that the files are rendered from.

    Attributes:
        least_driver: below it CUDA does not start.
        toolkit: CUDA's compiler; None if no extension is compiled.
        capabilities: that extensions are compiled for: "9.0".
        requirements: of the lock file, sorted.
        notes: what is to be known about it, in a line each.
    """

    options: Options
    base: Base
    build: Build
    least_driver: str
    toolkit: Toolkit | None
    capabilities: tuple[str, ...]
    requirements: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def tag(self) -> str:
        """pytorch-cuda-base:v2.13.0-cuda13.0-ubuntu24.04, the profile after it if it is another than train."""
        end = "" if self.options.profile == "train" else f"-{self.options.profile}"
        return f"pytorch-cuda-base:v{self.build.torch}-cuda{self.build.cuda}-{self.base.name}{end}"

    @property
    def versions(self) -> dict[str, str]:
        """What is in it, by name; what is not known is left out."""
        build, base = self.build, self.base
        found = {
            "torch": build.torch, "torchvision": build.torchvision, "cuda": build.cuda, "cudnn": build.cudnn,
            "nccl": build.nccl, "triton": build.triton, "python": base.python, "os": base.name, "base": base.reference,
            "hotloop": __version__, "least_driver": self.least_driver, "processor": build.processor,
        }  # fmt: skip
        return {name: value for name, value in found.items() if value}

    @property
    def created(self) -> str:
        """As OCI's label wants it."""
        return datetime.fromtimestamp(self.options.timestamp, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    @property
    def backend(self) -> str:
        """What uv calls a build that is not the default one: "cu126"; empty for the default."""
        return "" if self.build.default else f"cu{self.build.cuda.replace('.', '')}"


def make_recipe(wish: Wish, options: Options, table: Table) -> Recipe:
    """The newest torch that runs, on the base that has a Python for it.

    Raises:
        InputError: a base, a Python or a package that there is not, or that do not go together.
        HotloopError: no torch fits.
    """
    extensions = [_pinned(text) for text in options.extensions]
    more = [_requirement(text, "--package") for text in options.packages]
    base, found = _solved(wish, options, table)
    build = found.build
    toolkit = _toolkit(build) if extensions else None
    if toolkit and not gcc_for(toolkit, base):
        newest = f"g++ up to {toolkit.newest_gcc}" + (
            f", glibc up to {toolkit.newest_glibc}" * bool(toolkit.newest_glibc)
        )
        cause = f"CUDA {build.cuda} takes {newest}; it has g++ {', '.join(base.compilers)} and glibc {base.glibc}"
        raise InputError(f"extensions cannot be compiled on {base.name}", cause, "--base ubuntu24.04 --python 3.12")
    cards = wish.cards or build.binaries
    return Recipe(
        options=options,
        base=base,
        build=build,
        least_driver=table.cudas[build.cuda].least_driver,
        toolkit=toolkit,
        capabilities=tuple(f"{major}.{minor}" for major, minor in cards),
        requirements=_requirements(build, base, options, more),
        notes=(*found.notes, *_notes(base, build, options, toolkit)),
    )


def gcc_for(toolkit: Toolkit, base: Base) -> str:
    """The version of g++ among a base's that nvcc takes; empty if there is none. A base of one's own is trusted."""
    if not base.compilers:
        return "own"
    if toolkit.newest_glibc and Version(base.glibc) > Version(toolkit.newest_glibc):
        return ""
    return next((version for version in base.compilers if int(version) <= toolkit.newest_gcc), "")


def _solved(wish: Wish, options: Options, table: Table) -> tuple[Base, Solution]:
    """The first base for which there is a torch."""
    reasons: tuple[str, ...] = ()
    for base in _bases(wish, options.base):
        found = solve(replace(wish, python=base.python, glibc=base.glibc), table)
        if isinstance(found, Solution):
            return base, found
        reasons = reasons or (*found.reasons, *(change.text for change in found.changes[:1]))
    raise HotloopError("no torch fits", "; ".join(reasons), "hotloop resolve with the same options says what would")


def _bases(wish: Wish, name: str) -> list[Base]:
    """Those with the Python that is asked for; the one that is named, if one is."""
    known = known_bases()
    names = ", ".join(known)
    minor = ".".join(wish.python.split(".")[:2])
    if name and name not in known:
        if not re.search(r"[:/@]", name):
            raise InputError(
                f"--base {name} is not known", f"known: {names}; or an image with its tag", "--base debian12"
            )
        if not minor:
            cause = "which Python it brings is not known of an image that is not in the table"
            raise InputError(f"--base {name} needs --python", cause, f"--base {name} --python 3.12")
        if Version(minor) < OLDEST_PYTHON:
            cause = "the hotloop that comes into the image is not for it"
            raise InputError(f"Python {minor} is older than {OLDEST_PYTHON}", cause, "an image with a newer Python")
        return [own_base(name, minor)]
    fitting = [
        base for base in known.values() if base.name == (name or base.name) and base.python == (minor or base.python)
    ]
    if not fitting:
        each = ", ".join(f"{base.name} has {base.python}" for base in known.values())
        what = f"--base {name} has no Python {minor}" if name else f"no base has Python {minor}"
        raise InputError(what, each, "--python 3.12, or --base IMAGE --python VERSION with an image that has it")
    return fitting


def _toolkit(build: Build) -> Toolkit:
    toolkit = known_toolkits().get(build.cuda)
    if toolkit is None:
        has = ", ".join(known_toolkits())
        raise InputError(f"no image with CUDA {build.cuda}'s compiler is known", f"known: {has}", "--cuda 13.0")
    return toolkit


def _requirement(text: str, option: str) -> Requirement:
    try:
        return Requirement(text)
    except InvalidRequirement as error:
        cause = str(error).splitlines()[0]
        raise InputError(f'{option} "{text}" is no requirement', cause, f'{option} "einops>=0.8"') from None


def _pinned(text: str) -> Requirement:
    """An extension is compiled from the source of exactly one version."""
    requirement = _requirement(text, "--extension")
    if [one.operator for one in requirement.specifier] != ["=="]:
        fix = f'--extension "{requirement.name}==VERSION"'
        raise InputError(f'--extension "{text}" names no version', "what is compiled has to be one version", fix)
    return requirement


def _requirements(build: Build, base: Base, options: Options, more: Iterable[Requirement]) -> tuple[str, ...]:
    major = build.cuda.split(".")[0]
    found = [f"torch=={build.torch}", f"torchvision=={build.torchvision}", *_own(build, options.profile)]
    if Version(build.torch) < NUMPY_2:
        found.append("numpy<2")
    by_part = {
        "dali": [f"nvidia-dali-cuda{major}0"],
        "exporter": ["prometheus-client"],
        "gpu-decode": ["nvidia-nvjpeg" if major == "13" else f"nvidia-nvjpeg-cu{major}"],
        "nvimagecodec": [f"nvidia-nvimgcodec-cu{major}"],
        "tensorboard": ["tensorboard"],
    }
    if options.extensions:
        found += ["ninja", "packaging", "setuptools", "wheel"]  # torch's own way of compiling, without isolation
    if options.profile == "develop":
        found += ["ipykernel", "jupyterlab"]
    found += [text for part in options.parts for text in by_part[part]]
    return tuple(sorted({*found, *map(str, more)}))


def _own(build: Build, profile: Profile) -> list[str]:
    """What hotloop itself asks for; for training with all of its parts, if this torch is one that it trains with."""
    asked = [Requirement(text) for text in metadata.requires("hotloop") or ()]
    training = {one.name: one for one in asked if one.marker and one.marker.evaluate({"extra": "train"})}
    trains = profile != "serve" and build.torch in training["torch"].specifier
    kept = [one for one in asked if not one.marker or (trains and one.name in training)]
    return [f"{one.name}{one.specifier}" for one in kept if one.name not in ("torch", "torchvision")]


def _notes(base: Base, build: Build, options: Options, toolkit: Toolkit | None) -> list[str]:
    notes = []
    if not base.digest:
        notes.append(f"no digest of {base.image} is known: its tag may move")
    if toolkit:
        notes.append(f"no digest of {toolkit.image} is known: its tag may move; none of it is in the final image")
    if not build.default:
        notes.append(f"CUDA {build.cuda} is not this torch's default: uv fetches it, from where torch's own builds lie")
    if options.profile != "serve" and not any(one.startswith("timm") for one in _own(build, options.profile)):
        notes.append("hotloop trains with newer torch only: in this image it examines and explains")
    if options.profile == "serve":
        notes.append("no compiler is in it: models run as they are, or exported; torch.compile needs the profile train")
    return notes
