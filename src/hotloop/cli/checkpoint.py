"""`hotloop checkpoint`."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from hotloop.core.units import format_bytes

_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
_path = click.argument("path", type=click.Path(exists=True, path_type=Path))


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def checkpoint() -> None:
    """List, verify and convert checkpoints.

    PATH is a run, a folder of checkpoints, or one of them.
    """


@checkpoint.command(name="list")
@_path
@_json
def list_(path: Path, as_json: bool) -> None:
    """Say which checkpoints there are, oldest first. Their content is not read."""
    from hotloop.train.checkpoint.table import stored_checkpoints

    _print([_row(one) for one in stored_checkpoints(path)], as_json)


@checkpoint.command()
@_path
@_json
def verify(path: Path, as_json: bool) -> None:
    """Read checkpoints whole and compare them with their hashes. The exit code is 1 if one is damaged."""
    from hotloop.train.checkpoint.table import stored_checkpoints

    rows = [_row(one) for one in stored_checkpoints(path, verify=True)]
    _print(rows, as_json)
    if any(row["damage"] for row in rows):
        raise click.exceptions.Exit(1)


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
