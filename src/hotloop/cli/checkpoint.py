"""`hotloop checkpoint`."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from hotloop.core.errors import InputError
from hotloop.core.units import format_bytes


class _Place(click.Path):
    """A path that is there, or an address in object storage, which stays as it is typed."""

    def __init__(self) -> None:
        super().__init__(exists=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> Any:
        from hotloop.data.object_store import is_remote

        return value if isinstance(value, str) and is_remote(value) else super().convert(value, param, context)


def _client_key(context: click.Context, param: click.Parameter, value: str) -> str:
    from hotloop.core.job import where_the_key_is

    try:
        return where_the_key_is(value)
    except ValueError as error:
        raise click.BadParameter(str(error), context, param) from None


_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
_path = click.argument("path", type=click.Path(exists=True, path_type=Path))
_place = click.argument("place", metavar="PATH", type=_Place())


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def checkpoint() -> None:
    """List, verify and convert checkpoints.

    PATH is a run, a folder of checkpoints, or one of them.
    """


@checkpoint.command(name="list")
@_place
@_json
def list_(place: Path | str, as_json: bool) -> None:
    """Say which checkpoints there are, oldest first. Their content is not read.

    PATH may be a place in object storage: of copies, of a run's, or of one.
    """
    _print([_row(one) for one in _stored(place)], as_json)


@checkpoint.command()
@_place
@click.option(
    "--client-key",
    default="",
    callback=_client_key,
    metavar="KEY",
    help="file:PATH or env:VARIABLE, that copies are encrypted with.",
)
@_json
def verify(place: Path | str, client_key: str, as_json: bool) -> None:
    """Read checkpoints whole and compare them with their hashes. The exit code is 1 if one is damaged.

    PATH may be a place in object storage; nothing of what is read there is kept.
    """
    rows = [_row(one) for one in _stored(place, client_key, verify=True)]
    _print(rows, as_json)
    if any(row["damage"] for row in rows):
        raise click.exceptions.Exit(1)


def _stored(place: Path | str, client_key: str = "", verify: bool = False) -> list[Any]:
    if isinstance(place, str):
        from hotloop.train.checkpoint.copied import copied_checkpoints

        return list(copied_checkpoints(place, verify, client_key))
    from hotloop.train.checkpoint.table import stored_checkpoints

    if client_key:
        cause = "checkpoints on the disk are not encrypted by hotloop, their copies in object storage are"
        raise InputError("--client-key goes with object storage", cause, "name s3://bucket/folder, or leave it out")
    return list(stored_checkpoints(place, verify))


@checkpoint.command()
@_path
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--weights",
    type=click.Choice(["model", "averaged", "all"]),
    default="model",
    show_default=True,
    help="What is trained; its moving average; or every tensor, the optimizer's too.",
)
@click.option("--force", is_flag=True, help="Replace OUT.")
@_json
def convert(path: Path, out: Path, weights: str, force: bool, as_json: bool) -> None:
    """Write the weights of a checkpoint, of a run its newest whole one, to a .safetensors file."""
    from hotloop.train.checkpoint.checkpointer import named_checkpoint
    from hotloop.train.checkpoint.convert import convert as write
    from hotloop.train.checkpoint.convert import require_place

    require_place(path, out, force)
    loaded = named_checkpoint(path, lambda text: click.echo(f"warning: {text}", err=True), lazily=True)
    tensors = write(loaded, out, weights, force)
    size = out.stat().st_size
    if as_json:
        click.echo(json.dumps({"checkpoint": str(loaded.path), "out": str(out), "tensors": tensors, "bytes": size}))
    else:
        click.echo(f"{out}: {tensors} tensors, {format_bytes(size)}, from {loaded.path}")


def _row(one: Any) -> dict[str, Any]:
    epoch, step = one.position
    saved = datetime.fromtimestamp(one.saved).astimezone().isoformat(timespec="seconds")
    row = {"path": str(one.path), "epoch": epoch, "step": step, "bytes": one.size_bytes, "saved": saved}
    return row if one.damage is None else {**row, "damage": one.damage}


def _print(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"checkpoints": rows}))
        return
    for row in rows:
        state = "" if "damage" not in row else f"  {'damaged: ' + row['damage'] if row['damage'] else 'whole'}"
        click.echo(f"{row['path']}  {format_bytes(row['bytes'])}  {row['saved']}{state}")
