"""`hotloop predict`."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hotloop.cli.export import missing, public_key, read_key, read_secret
from hotloop.core.run import plain
from hotloop.core.units import count

if TYPE_CHECKING:
    from hotloop.export.predict import Prediction


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("model", type=click.Path(path_type=Path))
@click.argument("images", nargs=-1, required=True)
@public_key
@click.option("--decrypt", metavar="FILE|env:NAME", help="The secret that it was encrypted with.")
@click.option("--top", type=click.IntRange(1), default=3, show_default=True, metavar="N", help="Likeliest classes.")
@click.option("--batch", type=click.IntRange(1, 4096), default=16, show_default=True, metavar="N",
              help="Images that are computed together.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def predict(
    model: Path, images: tuple[str, ...], key: Path | None, decrypt: str | None, top: int, batch: int, as_json: bool
) -> int:  # fmt: skip
    """Say what an exported image classifier sees in files.

    MODEL is what `hotloop export` wrote, with its manifest beside it: it is verified first. IMAGES are files, folders,
    or patterns. Files that cannot be read are named, and the exit code is 1.

    \b
      hotloop predict runs/latest/export/model.onnx photo.jpg more/ 'others/*.png'
    """  # noqa: D301 - click's sign for lines that stay as they are
    try:
        from hotloop.export.images import find_files
        from hotloop.export.predict import open_classifier

        classifier = open_classifier(model, read_key(key), read_secret(decrypt))
    except ModuleNotFoundError as error:
        missing(error)
    rows: list[dict[str, Any]] = []
    done = unread = 0
    for one in classifier.predict(find_files(images), top, batch):
        done += 1
        unread += bool(one.reason)
        if as_json:
            rows.append(_row(one))
        elif one.reason:
            click.echo(f"{one.path}: cannot be read: {one.reason}", err=True)
        else:
            click.echo("  ".join([one.path, *(f"{name} {probability:.4f}" for name, probability in one.classes)]))
    if as_json:
        trusted = classifier.verified.trusted
        told = {"model": os.fspath(model), "trusted": trusted, "images": rows, "unreadable": unread}
        click.echo(json.dumps(plain(told)))
    elif unread:
        click.echo(f"{count(unread, 'file')} of {done:,} could not be read", err=True)
    return 1 if unread else 0


def _row(one: "Prediction") -> dict[str, Any]:
    if one.reason:
        return {"path": one.path, "error": one.reason}
    return {"path": one.path, "classes": [{"class": name, "probability": share} for name, share in one.classes]}
