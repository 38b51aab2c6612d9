"""`hotloop export`."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

import click

from hotloop.cli.number import Number
from hotloop.core.errors import InputError
from hotloop.core.run import plain
from hotloop.core.units import format_bytes

if TYPE_CHECKING:
    from hotloop.export.exporting import Wanted
    from hotloop.export.manifest import Kind, Manifest, Precision
    from hotloop.export.source import Weights

_HELP = {"help_option_names": ["-h", "--help"]}
_file = click.Path(dir_okay=False, path_type=Path)
_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
public_key = click.option("--key", type=_file, metavar="PUBLIC", help="Take only what this key has signed.")


class _RunOrCommand(click.Group):
    """What follows is a run to export, unless it names one of our own commands."""

    allow_interspersed_args = True

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if args and args[0] in self.commands:
            return self.commands[args[0]].make_context(f"{info_name} {args[0]}", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return click.Command.parse_args(self, ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        return click.Command.invoke(self, ctx)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return click.Command.collect_usage_pieces(self, ctx)


class _Run(click.Argument):
    """What stands in the usage of `export` itself, and not of its commands."""

    def get_usage_pieces(self, ctx: click.Context) -> list[str]:
        return super().get_usage_pieces(ctx) if isinstance(ctx.command, _RunOrCommand) else []


@click.group(cls=_RunOrCommand, context_settings=_HELP)
@click.argument("run", cls=_Run)
@click.option("--to", "kind", default="onnx", show_default=True,
              type=click.Choice(["onnx", "torch", "safetensors", "tensorrt"]),
              help="A program for onnxruntime, torch or TensorRT; or the weights alone.")  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="[default: RUN/export/model.onnx]")
@click.option("--precision", type=click.Choice(["fp32", "fp16", "int8"]), default="fp32", show_default=True,
              help="int8: ranges are measured on the validation data.")  # fmt: skip
@click.option("--opset", type=click.IntRange(1), metavar="N", help="Of ONNX's operators.  [default: torch's choice]")
@click.option("--weights", type=click.Choice(["auto", "model", "averaged"]), default="auto", show_default=True,
              help="auto: those that the run validates.")  # fmt: skip
@click.option("--sign", type=_file, metavar="PRIVATE", help="Sign it with this key; `hotloop export key` makes one.")
@click.option("--encrypt", metavar="FILE|env:NAME", help="Encrypt it with the secret that is there.")
@click.option("--check/--no-check", default=True, show_default=True, help="Compare it with PyTorch, and time both.")
@click.option("--samples", type=click.IntRange(1), default=256, show_default=True, metavar="N",
              help="Of the validation data, to compare and calibrate on.")  # fmt: skip
@click.option("--tolerance", type=Number(0), default=1e-4, show_default=True, metavar="ERROR",
              help="Of outputs, in fp32.")  # fmt: skip
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Lay a value over the run's job.")
@click.option("--root", default="runs", type=click.Path(file_okay=False, path_type=Path), show_default=True,
              help="Folder of the runs.")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace an earlier file.")
@_json
def export(
    run: str, kind: str, out: Path | None, precision: str, opset: int | None, weights: str, sign: Path | None,
    encrypt: str | None, check: bool, samples: int, tolerance: float, overrides: tuple[str, ...], root: Path,
    force: bool, as_json: bool,
) -> int:  # fmt: skip
    """Write a run's model to a file that serves, checked, with all that it needs.

    RUN is a name in the runs' folder, "latest", a run's directory, or one of its checkpoints.

    \b
      hotloop export runs/latest --to onnx
      hotloop export runs/latest --sign release.key
      hotloop export verify runs/latest/export/model.onnx --key release.key.pub
    """  # noqa: D301 - click's sign for lines that stay as they are
    from hotloop.cli.train import set_environment, standard_output_to_error

    set_environment()
    sys.path.append(os.getcwd())  # "module:name" in a job means the user's own files
    with standard_output_to_error() if as_json else nullcontext(), _needed():
        signer, secret = _keys(sign, encrypt)
        from hotloop.export.artefact import refuse_existing
        from hotloop.export.exporting import Wanted, default_name
        from hotloop.export.exporting import export as write
        from hotloop.export.source import named_run, open_source, open_weights

        found, path = named_run(run, root)
        form = cast("Kind", kind), cast("Precision", precision)
        out = out or found.directory / "export" / default_name(*form, encrypted=secret is not None)
        refuse_existing(out, force)
        wanted = Wanted(form[0], out, form[1], opset, samples, tolerance, check, signer, secret, force)
        opened = open_weights if kind == "safetensors" else open_source
        manifest = write(opened(found, path, overrides, cast("Weights", weights), _tell), wanted, _tell)
    click.echo(json.dumps(_summary(wanted, manifest)) if as_json else "\n".join(_lines(wanted, manifest)))
    return 0


@export.command(context_settings=_HELP)
@click.argument("file", type=click.Path(path_type=Path))
@public_key
@_json
def verify(file: Path, key: Path | None, as_json: bool) -> int:
    """Say whether a model is as it was exported, and by whom. The exit code is 1 if it is not.

    FILE is the model; its manifest and signature lie beside it. Without a key it may have been signed by anybody, and
    one without a signature is only compared with its hashes.
    """
    from hotloop.export.artefact import UnverifiedModel
    from hotloop.export.artefact import verify as check

    with _needed():
        try:
            verified = check(file, read_key(key))
        except UnverifiedModel as error:
            if as_json:
                click.echo(json.dumps({"file": str(file), "verified": False, "reason": f"{error.what}: {error.cause}"}))
            raise
    manifest = verified.manifest
    names = [stored.name for stored in manifest.files]
    if as_json:
        click.echo(json.dumps({
            "file": str(file), "verified": True, "trusted": verified.trusted, "signed_by": manifest.signer,
            "checked": ["hashes", *(["signature"] if manifest.signer else [])], "files": names,
            "manifest": plain(asdict(manifest)),
        }))  # fmt: skip
        return 0
    whose = (
        "the key given" if verified.trusted else f"{manifest.signer}, which nobody has vouched for: give --key PUBLIC"
    )
    click.echo(f"{file}: as it was exported, {manifest.created}")
    click.echo(
        f"signed by {whose}" if manifest.signer else "not signed: whoever changed it may have changed its hashes"
    )
    return 0


@export.command(context_settings=_HELP)
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--secret", is_flag=True, help="Make a secret to encrypt with instead.")
def key(file: Path, secret: bool) -> int:
    """Make a key to sign with: FILE, for its owner alone, and FILE.pub, for everybody."""
    with _needed():
        from hotloop.export.keys import make_pair, make_secret

        if secret:
            make_secret(file)
            click.echo(f"{file}: a secret; keep it apart from what it encrypts")
        else:
            public, name = make_pair(file)
            click.echo(f"{file}: signs, keep it; {public}: verifies, give it away\n{name}")
    return 0


def read_key(file: Path | None) -> Any:
    """The public key in a file, or None."""
    if file is None:
        return None
    from hotloop.export.keys import read_public

    return read_public(file)


def read_secret(place: str | None) -> bytes | None:
    """The secret that is there, or None."""
    if place is None:
        return None
    from hotloop.export.keys import read_secret as read

    return read(place)


def _keys(sign: Path | None, encrypt: str | None) -> tuple[Any, bytes | None]:
    if sign is None:
        return None, read_secret(encrypt)
    from hotloop.export.keys import read_private

    return read_private(sign), read_secret(encrypt)


@contextmanager
def _needed() -> Iterator[None]:
    """What is not installed, in three lines."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing(error)


def missing(error: ModuleNotFoundError) -> NoReturn:
    """A package that exporting or predicting needs is not installed.

    Raises:
        InputError: so; another module's error stays as it is.
    """
    name = (error.name or "").split(".")[0]
    extras = {"torch": "train", "safetensors": "train", "cryptography": "export", "onnx": "export", "onnx_ir": "export"}
    extras |= dict.fromkeys(("onnxscript", "onnxruntime", "numpy", "PIL", "simplejpeg"), "export")
    if name not in extras:
        raise error
    install = 'pip install "hotloop[train,export]"' if extras[name] == "train" else 'pip install "hotloop[export]"'
    raise InputError("this needs more packages", f"{name} is not installed", install) from None


def _tell(text: str) -> None:
    click.echo(f"hotloop: {text}", err=True)


def _summary(wanted: "Wanted", manifest: "Manifest") -> dict[str, Any]:
    agreement = manifest.agreement
    return plain({  # type: ignore[no-any-return]
        "file": str(wanted.out), "bytes": sum(one.bytes for one in manifest.files), "kind": manifest.kind,
        "precision": manifest.precision, "opset": manifest.opset,
        "max_abs_error": agreement.max_abs_error if agreement else None, "latency_ms": manifest.latency_ms,
        "latency": [asdict(one) for one in manifest.latency], "agreement": asdict(agreement) if agreement else None,
        "signed_by": manifest.signer, "encrypted": bool(manifest.encryption), "origin": asdict(manifest.origin),
    })  # fmt: skip


def _lines(wanted: "Wanted", manifest: "Manifest") -> list[str]:
    origin, agreement = manifest.origin, manifest.agreement
    size = format_bytes(sum(one.bytes for one in manifest.files))
    kind = f"{manifest.kind}{f' opset {manifest.opset}' if manifest.opset else ''}, {manifest.precision}"
    lines = [f"{wanted.out}: {size}, {kind}, of step {origin.step:,} of {origin.run} ({origin.weights} weights)"]
    if agreement is None:
        lines.append("not compared with PyTorch")
    elif manifest.kind == "safetensors":
        lines.append("read back: the same bits")
    else:
        limit = f" ({agreement.tolerance:g} is allowed)" if agreement.tolerance else ""
        lines.append(
            f"outputs differ from PyTorch's by {agreement.max_abs_error:.2g} at most{limit}, "
            f"over {agreement.random} random and {agreement.real} real inputs"
        )
    for name, before in agreement.before.items() if agreement else ():
        assert agreement
        lines.append(f"{name} {before:.4f} in PyTorch, {agreement.after[name]:.4f} of this file, over the same samples")
    for one in manifest.latency:
        spread = f"({one.low_ms:.3g} to {one.high_ms:.3g}, n = {one.n})"
        lines.append(f"batch of {one.batch}, {one.engine}: {one.median_ms:.3g} ms {spread}")
    lines.append(f"signed by {manifest.signer}" if manifest.signer else "not signed")
    return lines
