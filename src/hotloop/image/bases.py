"""What images begin with: operating systems with their Python, and CUDA's toolkits for compiling extensions."""

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class Base:
    """An image that ours begins with.

    Attributes:
        name: of the operating system, as it stands in tags: "ubuntu24.04".
        image: its reference, without a digest.
        digest: of its index; empty where none is known.
        python: that it brings, or that its packages do: "3.12".
        glibc: of its C library.
        python_packages, header_packages, venv_packages: for Python itself, for compiling against it, for venv.
        image_packages: libraries that decode images.
        compilers: versions of g++ that its packages have, its own first; empty: only its own, whatever that is.
    """

    name: str
    image: str
    digest: str
    python: str
    glibc: str
    python_packages: tuple[str, ...]
    header_packages: tuple[str, ...]
    venv_packages: tuple[str, ...]
    image_packages: tuple[str, ...]
    compilers: tuple[str, ...]

    @property
    def reference(self) -> str:
        """What FROM names."""
        return f"{self.image}@{self.digest}" if self.digest else self.image


@dataclass(frozen=True)
class Toolkit:
    """An image that holds CUDA's compiler.

    Attributes:
        newest_gcc: that its nvcc takes.
        newest_glibc: whose headers go with its own; empty if any do.
    """

    cuda: str
    image: str
    newest_gcc: int
    newest_glibc: str


@cache
def known_bases() -> dict[str, Base]:
    """By name; the one that is taken if nothing speaks against it first."""
    found = {}
    for row in _data()["base"]:
        values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
        found[row["name"]] = Base(**values)
    return found


@cache
def known_toolkits() -> dict[str, Toolkit]:
    """By version of CUDA."""
    return {row["cuda"]: Toolkit(**row) for row in _data()["toolkit"]}


def own_base(reference: str, python: str) -> Base:
    """An image of the user's own, of the Debian family, with a python3 in it or among its packages."""
    image, _, digest = reference.partition("@")
    name = image.rsplit("/", 1)[-1].replace(":", "-")
    packages = ("python3",), ("libpython3-dev",), ("python3-venv",)
    return Base(name, image, digest, python, "", *packages, image_packages=("libturbojpeg0",), compilers=())


@cache
def _data() -> Any:
    return tomllib.loads(resources.files("hotloop.image").joinpath("bases.toml").read_text())
