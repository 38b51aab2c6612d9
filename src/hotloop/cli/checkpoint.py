"""`hotloop checkpoint`."""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from hotloop.cli.ending import ended_by_signals
from hotloop.core.errors import HotloopError, InputError
from hotloop.core.units import format_bytes

if TYPE_CHECKING:
    from hotloop.train.checkpoint.checkpointer import Loaded
    from hotloop.train.checkpoint.table import Stored


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
_place = click.argument("place", metavar="PATH", type=_Place())
_key = click.option(
    "--client-key",
    default="",
    callback=_client_key,
    metavar="KEY",
    help="file:PATH or env:VARIABLE, that copies are encrypted with.",
)


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
    rows = [_row(one) for one in _stored(place)]
    if as_json:
        click.echo(json.dumps({"checkpoints": rows}))
        return
    for row in rows:
        click.echo(_line(row))


@checkpoint.command()
@_place
@_key
@_json
def verify(place: Path | str, client_key: str, as_json: bool) -> None:
    """Read checkpoints whole and compare them with their hashes. The exit code is 1 if one is damaged.

    PATH may be a place in object storage; nothing of what is read there is kept.
    """
    rows = []
    with _reading(place, client_key) as (checkpoints, say):
        for one in checkpoints:
            rows.append(_row(one))
            if not as_json:  # as it is found: the next one may take long
                say(_line(rows[-1]))
    if as_json:
        click.echo(json.dumps({"checkpoints": rows}))
    if any(row["damage"] for row in rows):
        raise click.exceptions.Exit(1)


@checkpoint.command()
@_place
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--weights",
    type=click.Choice(["model", "averaged", "all"]),
    default="model",
    show_default=True,
    help="What is trained; its moving average; or every tensor, the optimizer's too.",
)
@click.option("--force", is_flag=True, help="Replace OUT.")
@_key
@_json
def convert(place: Path | str, out: Path, weights: str, force: bool, client_key: str, as_json: bool) -> None:
    """Write the weights of a checkpoint, of a run its newest whole one, to a .safetensors file.

    PATH may be a place in object storage; the copy is brought beside OUT first, and removed.
    """
    from hotloop.train.checkpoint.convert import convert as write
    from hotloop.train.checkpoint.convert import require_place

    require_place(place, out, force)
    with ended_by_signals():
        tensors, source = _with_checkpoint(place, out, client_key, lambda loaded: write(loaded, out, weights, force))
    size = out.stat().st_size
    if as_json:
        click.echo(json.dumps({"checkpoint": source, "out": str(out), "tensors": tensors, "bytes": size}))
    else:
        click.echo(f"{out}: {tensors} tensors, {format_bytes(size)}, from {source}")


def _stored(place: Path | str) -> "list[Stored]":
    if isinstance(place, str):
        from hotloop.train.checkpoint.copied import Copied

        return Copied(place).stored()
    from hotloop.train.checkpoint.table import stored_checkpoints

    return list(stored_checkpoints(place))


@contextmanager
def _reading(place: Path | str, client_key: str) -> "Iterator[tuple[Iterable[Stored], Callable[[str], None]]]":
    """What is verified, each as it is asked for, and who prints a line meanwhile."""
    if isinstance(place, str):
        from hotloop.cli.bar import Bar
        from hotloop.train.checkpoint.copied import Copied

        copied = Copied(place, client_key)
        with Bar(sum(one.size_bytes for one in copied.stored()), in_bytes=True) as bar:
            yield copied.verified(bar.advance), bar.say
        return
    from hotloop.train.checkpoint.table import stored_checkpoints

    _refuse_key(client_key)
    yield stored_checkpoints(place, verify=True), click.echo


def _with_checkpoint(
    place: Path | str, out: Path, client_key: str, use: "Callable[[Loaded], int]"
) -> tuple[int, str]:  # fmt: skip
    """What is made of a checkpoint, and where that is from."""
    from hotloop.train.checkpoint.checkpointer import load_checkpoint, named_checkpoint

    if isinstance(place, Path):
        _refuse_key(client_key)
        loaded = named_checkpoint(place, lambda text: click.echo(f"warning: {text}", err=True), lazily=True)
        return use(loaded), str(loaded.path)
    from hotloop.cli.bar import Bar
    from hotloop.train.checkpoint.copied import Copied

    copied = Copied(place, client_key)
    # What a network's file system still has open cannot be removed, which says nothing of OUT.
    with TemporaryDirectory(prefix=".hotloop-", dir=out.absolute().parent, ignore_cleanup_errors=True) as folder:
        with Bar(copied.stored()[-1].size_bytes, in_bytes=True) as bar:
            path, source = copied.fetch_newest(
                Path(folder), lambda text: bar.say(f"warning: {text}", err=True), bar.advance
            )
        try:
            return use(load_checkpoint(path, lazily=True, hashes=None)), source
        except HotloopError as error:
            raise type(error)(error.what.replace(str(path), source), error.cause, error.fix) from None


def _refuse_key(client_key: str) -> None:
    if client_key:
        cause = "checkpoints on the disk are not encrypted by hotloop, their copies in object storage are"
        raise InputError("--client-key goes with object storage", cause, "name s3://bucket/folder, or leave it out")


def _row(one: "Stored") -> dict[str, Any]:
    epoch, step = one.position
    saved = datetime.fromtimestamp(one.saved).astimezone().isoformat(timespec="seconds")
    row = {"path": str(one.path), "epoch": epoch, "step": step, "bytes": one.size_bytes, "saved": saved}
    return row if one.damage is None else {**row, "damage": one.damage}


def _line(row: dict[str, Any]) -> str:
    state = "" if "damage" not in row else f"  {'damaged: ' + row['damage'] if row['damage'] else 'whole'}"
    return f"{row['path']}  {format_bytes(row['bytes'])}  {row['saved']}{state}"
