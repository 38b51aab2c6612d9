"""Options of how containers are started, shared by commands about images."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hotloop.core.errors import InputError

if TYPE_CHECKING:
    from hotloop.image.engines import RunSettings

engine_option = click.option(
    "--engine", type=click.Choice(["docker", "podman", "buildah"]), help="[default: the first of them that is here]"
)


def run_settings(
    gpus: str = "", mounts: Sequence[str] = (), variables: Sequence[str] = (), shm_size: str = "8g", user: str = "",
    writable: bool = False,
) -> "RunSettings":  # fmt: skip
    """What was typed, checked, with this machine's GPUs and this user for what was not.

    Raises:
        InputError: something typed cannot be used.
    """
    from hotloop.core.machine import read_machine
    from hotloop.image.engines import RunSettings

    if gpus and not re.fullmatch(r"all|none|\d+(,\d+)*", gpus):
        raise InputError(f'--gpus "{gpus}" names no GPUs', "all, none, or numbers", "--gpus 0,1")
    if not re.fullmatch(r"\d+[bkmg]?", shm_size.lower()):
        raise InputError(f'--shm-size "{shm_size}" is no size', "a number with b, k, m or g after it", "--shm-size 8g")
    if user and not re.fullmatch(r"\d+(:\d+)?", user):
        raise InputError(f'--user "{user}" is no number', "an image need not know names", "--user 1000:1000")
    for mount in mounts:
        source, _, target = mount.partition(":")
        if not target.startswith("/"):
            raise InputError(
                f'--mount "{mount}" has no target', "a path inside, after a colon", f"--mount {source}:/data"
            )
        if source.startswith(("/", ".")) and not Path(source).exists():
            raise InputError(
                f"--mount {mount}: there is no {source}", "an engine would make an empty folder", f"ls {source}"
            )
    if unnamed := [one for one in variables if one.startswith("=") or not one]:
        raise InputError(f'--env "{unnamed[0]}" names no variable', "NAME=VALUE, or NAME for yours", "--env A=1")
    own = "" if os.geteuid() == 0 else f"{os.geteuid()}:{os.getegid()}"
    absolute = [f"{Path(mount.partition(':')[0]).absolute()}:{mount.partition(':')[2]}" for mount in mounts]
    here = gpus or ("all" if read_machine().gpus else "none")
    return RunSettings(here, tuple(absolute), tuple(variables), shm_size, user or own, writable)
