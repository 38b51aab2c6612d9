"""`hotloop image`: render, build and run."""

import json
import shlex
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hotloop.cli.image_check import COMMANDS
from hotloop.cli.image_engine import engine_option, run_settings
from hotloop.cli.wishes import read_wish, wish_options
from hotloop.core.errors import InputError

if TYPE_CHECKING:
    from hotloop.image.engines import Engine
    from hotloop.image.recipe import Recipe

_PARTS = ("dali", "exporter", "gpu-decode", "nvimagecodec", "tensorboard")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def image() -> None:
    """Render, build and check container images."""


@image.command()
@wish_options(python="the base's")
@click.option("--base", default="", metavar="NAME", help="ubuntu24.04, debian12, debian13; or an image and --python.")
@click.option("--profile", type=click.Choice(["train", "develop", "serve"]), default="train", show_default=True,
              help="develop adds Jupyter and an editor; serve has no compilers.")  # fmt: skip
@click.option("--with", "parts", multiple=True, type=click.Choice(_PARTS), help="May be repeated.")
@click.option("--package", "packages", multiple=True, metavar="REQUIREMENT", help="One more; may be repeated.")
@click.option("--extension", "extensions", multiple=True, metavar="NAME==VERSION",
              help="A package that is compiled against torch and CUDA; may be repeated.")  # fmt: skip
@click.option("--aarch64", is_flag=True, help="For 64-bit Arm processors; GH200, GB200 and Jetsons have one anyway.")
@click.option("--timestamp", type=click.IntRange(0), envvar="SOURCE_DATE_EPOCH", metavar="SECONDS",
              help="Since 1970, of all files and the label.  [default: SOURCE_DATE_EPOCH, or now]")  # fmt: skip
@click.option("--source", default="", metavar="ADDRESS", help="Of what it is made from, for its label.")
@click.option("--output", type=click.Path(file_okay=False, path_type=Path), metavar="FOLDER",
              help="Write the files there, packages locked with hashes among them.")  # fmt: skip
@click.option("--apptainer", is_flag=True, help="Also write image.def, for clusters.")
@click.option("--devcontainer", is_flag=True, help="Also write .devcontainer/devcontainer.json.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def render(
    driver: str, gpus: tuple[str, ...], capabilities: tuple[str, ...], python: str, torch: str, cuda: str, base: str,
    profile: Any, parts: tuple[str, ...], packages: tuple[str, ...], extensions: tuple[str, ...], aarch64: bool,
    timestamp: int | None, source: str, output: Path | None, apptainer: bool, devcontainer: bool, as_json: bool,
) -> int:  # fmt: skip
    """Write a Dockerfile whose versions go together.

    They are solved as by `hotloop resolve`, for a driver and cards, or for this machine. Without --output the
    Dockerfile is printed. The lock file is made by uv for the image's Python; it takes seconds.
    """
    from hotloop.image.recipe import Options, make_recipe
    from hotloop.image.render import dockerfile
    from hotloop.versions.table import current_table

    if (apptainer or devcontainer) and not output:
        option = "--apptainer" if apptainer else "--devcontainer"
        raise InputError(f"{option} writes a file", "no folder is named", f"{option} --output FOLDER")
    table = current_table()
    given = {"driver": driver, "python": python, "cuda": cuda}
    example = "hotloop image render --driver 580 --gpu H100"
    wish = read_wish(table, gpus, capabilities, given, torch, aarch64=aarch64, example=example)
    if not python:  # of this machine the driver and the cards count; Python and the C library are the base's
        wish = replace(wish, python="")
    moment = int(time.time()) if timestamp is None else timestamp
    options = Options(profile, base, tuple(sorted(set(parts))), packages, extensions, moment, source)
    recipe = make_recipe(wish, options, table)
    files = _written(recipe, output, apptainer=apptainer, devcontainer=devcontainer) if output else []
    for note in recipe.notes:
        click.echo(f"note: {note}", err=True)
    if as_json:
        found = {"dockerfile": dockerfile(recipe), "tag": recipe.tag, "versions": recipe.versions}
        click.echo(json.dumps({**found, "requirements": recipe.requirements, "notes": recipe.notes, "files": files}))
    elif output:
        shown = shlex.join(["hotloop", "image", "build", str(output)])
        click.echo("\n".join([f"{recipe.tag} in {output}: {', '.join(files)}", shown]))
    else:
        click.echo(dockerfile(recipe), nl=False)
    return 0


@image.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--tag", default="", metavar="NAME:VERSION", help="[default: what the Dockerfile was rendered for]")
@click.option("--timestamp", type=click.IntRange(0), envvar="SOURCE_DATE_EPOCH", metavar="SECONDS",
              help="Of all files: the same bytes each time.  [default: what it was rendered with]")  # fmt: skip
@click.option("--pip-config", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
              help="How pip reaches an index; no layer keeps it.")  # fmt: skip
@click.option("--certificates", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
              help="That pip trusts; no layer keeps them.")  # fmt: skip
@click.option("--no-cache", is_flag=True, help="Do every step anew.")
@engine_option
@click.option("--print", "only_print", is_flag=True, help="Print the command, and do nothing.")
def build(
    folder: Path, tag: str, timestamp: int | None, pip_config: Path | None, certificates: Path | None, no_cache: bool,
    engine: "Engine | None", only_print: bool,
) -> int:  # fmt: skip
    """Build what was rendered into FOLDER, by docker, podman or buildah."""
    from hotloop.image.engines import BuildSettings, build_command, find_engine
    from hotloop.image.engines import build as build_image
    from hotloop.image.instructions import rendered_for

    named, moment = rendered_for(folder / "Dockerfile")
    secrets = {"pip.conf": pip_config, "ca-certificates": certificates}
    settings = BuildSettings(
        tag=tag or named,
        timestamp=moment if timestamp is None else timestamp,
        secrets={name: path.absolute() for name, path in secrets.items() if path},
        no_cache=no_cache,
    )
    if not settings.tag:
        raise InputError(f"{folder}/Dockerfile names no tag", "hotloop did not render it", "--tag NAME:VERSION")
    if only_print:
        click.echo(shlex.join(build_command(engine or find_engine(), folder, settings)))
    else:
        build_image(find_engine(engine), folder, settings)
        click.echo(settings.tag)
    return 0


@image.command(context_settings={"ignore_unknown_options": True})
@click.argument("tag")
@click.argument("command", nargs=-1, metavar="[-- COMMAND...]")
@click.option("--gpus", default="", metavar="all|none|0,1", help="[default: all, if there are any here]")
@click.option("--mount", "mounts", multiple=True, metavar="SOURCE:TARGET", help="A folder of yours; :ro after it.")
@click.option("--env", "variables", multiple=True, metavar="NAME[=VALUE]", help="A variable; may be repeated.")
@click.option("--shm-size", default="8g", show_default=True, help="Of /dev/shm, which NCCL and loaders use.")
@click.option("--user", default="", metavar="UID:GID", help="[default: yours; the image's own if you are root]")
@click.option("--writable", is_flag=True, help="Let the root file system be written.")
@engine_option
@click.option("--print", "only_print", is_flag=True, help="Print the command, and do nothing.")
def run(
    tag: str, command: tuple[str, ...], gpus: str, mounts: tuple[str, ...], variables: tuple[str, ...], shm_size: str,
    user: str, writable: bool, engine: "Engine | None", only_print: bool,
) -> int:  # fmt: skip
    """Start COMMAND in an image, with GPUs, mounts and limits.

    The root file system is read-only but for /tmp and a volume for caches; the process has no privileges, and is yours.
    The exit code is the command's.
    """
    from hotloop.image.engines import find_engine, run_command
    from hotloop.image.engines import run as run_image

    settings = run_settings(gpus, mounts, variables, shm_size, user, writable)
    if only_print:
        click.echo(shlex.join(run_command(engine or find_engine(), tag, command, settings)))
        return 0
    return run_image(find_engine(engine), tag, command, settings)


def _written(recipe: "Recipe", folder: Path, *, apptainer: bool, devcontainer: bool) -> list[str]:
    """Names of the files that were written."""
    from hotloop.core.errors import cannot_write
    from hotloop.core.files import write_atomic
    from hotloop.image import render as text
    from hotloop.image.lock import lock
    from hotloop.image.wheel import make_wheel, wheel_name

    content: dict[str, str | bytes] = {
        "Dockerfile": text.dockerfile(recipe),
        ".dockerignore": text.ignored(),
        "requirements.in": "\n".join(recipe.requirements) + "\n",
        **lock(recipe),
        wheel_name(): make_wheel(),
    }
    if apptainer:
        content["image.def"] = text.apptainer(recipe)
    if devcontainer:
        content[".devcontainer/devcontainer.json"] = text.devcontainer(recipe)
    for name, held in content.items():
        file = folder / name
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(file, held)
        except OSError as error:
            raise cannot_write(file, error, InputError) from None
    return sorted(content)


for _command in COMMANDS:
    image.add_command(_command)
