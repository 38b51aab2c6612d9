"""From a recipe to the files of a folder that an engine builds an image in."""

import json
from functools import cache
from typing import TYPE_CHECKING, Any

from hotloop.image.recipe import Recipe, gcc_for
from hotloop.image.wheel import wheel_name

if TYPE_CHECKING:
    from jinja2 import Environment

_DESCRIPTION = "PyTorch, CUDA and hotloop, for training on NVIDIA GPUs"
_EDITORS = ("git", "less", "nano", "openssh-client", "procps", "vim-tiny")
_COMMANDS = {"train": ("hotloop", "--help"), "develop": ("bash",), "serve": ("python",)}
_CACHE = "/home/hotloop/.cache"


def dockerfile(recipe: Recipe) -> str:
    """Two stages on one base: packages are installed in the first, the second takes what came of it."""
    base, profile = recipe.base, recipe.options.profile
    gcc = gcc_for(recipe.toolkit, base) if recipe.toolkit else ""
    compilers = [] if not gcc else ["g++"] if gcc == "own" else [f"g++-{gcc}"]
    return _rendered(
        "Dockerfile.j2",
        tag=recipe.tag, notes=recipe.notes, versions=recipe.versions, timestamp=recipe.options.timestamp,
        base=base, python=base.python, profile=profile, packages=_packages(recipe),
        build_packages=sorted({*base.venv_packages, *compilers, *(base.header_packages if gcc else ())}),
        toolkit=recipe.toolkit, gcc=gcc, capabilities=recipe.capabilities, backend=recipe.backend, wheel=wheel_name(),
        environment=_environment(recipe), labels=labels(recipe), command=_COMMANDS[profile],
    )  # fmt: skip


def ignored() -> str:
    """.dockerignore: nothing of the folder is sent but what the Dockerfile copies."""
    return "*\n!*.lock\n!*.whl\n"


def apptainer(recipe: Recipe) -> str:
    """A definition that makes an Apptainer file of the built image."""
    file = recipe.tag.replace(":", "-")
    save = f"docker save --output {file}.tar {recipe.tag}   # or: buildah push {recipe.tag} docker-archive:{file}.tar"
    return _rendered("image.def.j2", file=file, save=save, labels=labels(recipe))


def devcontainer(recipe: Recipe) -> str:
    """For editors that work inside of containers."""
    content = {
        "name": recipe.tag,
        "build": {"dockerfile": "../Dockerfile", "context": ".."},
        "runArgs": ["--gpus=all", "--shm-size=8g", "--ulimit=memlock=-1", "--ulimit=stack=67108864"],
        "hostRequirements": {"gpu": "optional"},
        "containerUser": "1000",
        "overrideCommand": True,
        "customizations": {
            "vscode": {
                "settings": {"python.defaultInterpreterPath": "/opt/venv/bin/python"},
                "extensions": ["ms-python.python", "ms-toolsai.jupyter", "charliermarsh.ruff"],
            }
        },
    }
    return json.dumps(content, indent=2) + "\n"


def labels(recipe: Recipe) -> dict[str, str]:
    """OCI's own, and each version under hotloop's name."""
    base = {"org.opencontainers.image.base.name": recipe.base.image}
    if recipe.base.digest:
        base["org.opencontainers.image.base.digest"] = recipe.base.digest
    if recipe.options.source:
        base["org.opencontainers.image.source"] = recipe.options.source
    return {
        "org.opencontainers.image.title": recipe.tag.split(":")[0],
        "org.opencontainers.image.description": _DESCRIPTION,
        "org.opencontainers.image.version": recipe.tag.split(":")[1],
        "org.opencontainers.image.created": recipe.created,
        **base,
        **{f"hotloop.{name}": value for name, value in recipe.versions.items()},
    }


def _packages(recipe: Recipe) -> list[str]:
    """Of the running image. Triton and torch.compile compile at run time: a C compiler and Python's headers for
    kernels on a card, a C++ compiler for kernels on a CPU.
    """
    base, profile = recipe.base, recipe.options.profile
    compiling = () if profile == "serve" else ("gcc", "g++", "libc6-dev", *base.header_packages)
    editors = _EDITORS if profile == "develop" else ()
    return sorted({"ca-certificates", "tini", "tzdata", *base.python_packages, *base.image_packages,
                   *compiling, *editors})  # fmt: skip


def _environment(recipe: Recipe) -> dict[str, str]:
    """USER and LOGNAME: torch asks who it runs as, and a numeric user need not have a name."""
    video = {"dali", "gpu-decode", "nvimagecodec"} & set(recipe.options.parts)
    return {
        "PATH": "/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "TZ": "Etc/UTC",
        "LANG": "C.UTF-8",
        "PYTHONUNBUFFERED": "1",
        "USER": "hotloop",
        "LOGNAME": "hotloop",
        "HOME": "/home/hotloop",
        "XDG_CACHE_HOME": _CACHE,
        "TORCHINDUCTOR_CACHE_DIR": f"{_CACHE}/inductor",
        "TRITON_CACHE_DIR": f"{_CACHE}/triton",
        "NVIDIA_VISIBLE_DEVICES": "all",
        "NVIDIA_DRIVER_CAPABILITIES": "compute,utility,video" if video else "compute,utility",
        "NVIDIA_REQUIRE_DRIVER": f"driver>={recipe.least_driver}",
    }


def _rendered(template: str, **values: Any) -> str:
    return str(_templates().get_template(template).render(**values))


@cache
def _templates() -> "Environment":
    from jinja2 import Environment, PackageLoader, StrictUndefined

    # Of Dockerfiles, not of pages: nothing is to be escaped for HTML.
    return Environment(  # noqa: S701
        loader=PackageLoader("hotloop.image"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True,
    )  # fmt: skip
