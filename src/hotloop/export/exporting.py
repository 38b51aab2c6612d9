"""From a run's model to a file that is checked, described and signed."""

import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save
from torch import Tensor
from torch.export import ExportedProgram

from hotloop import __version__
from hotloop.core.errors import HotloopError, InputError
from hotloop.export.artefact import publish, workspace
from hotloop.export.check import compare, time_both
from hotloop.export.manifest import Agreement, Kind, Latency, Manifest, Port, Precision, StoredFile
from hotloop.export.program import capture, package_forward, save_package
from hotloop.export.source import Forward, Source, Trained
from hotloop.train.checkpoint.convert import apart

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

SUFFIXES: Mapping[Kind, str] = {"onnx": ".onnx", "torch": ".pt2", "safetensors": ".safetensors", "tensorrt": ".engine"}
_ENGINES: Mapping[Kind, str] = {"onnx": "onnxruntime", "torch": "torch.export", "tensorrt": "tensorrt"}
_LARGEST_BATCH = 32
"""Of TensorRT engines."""


@dataclass(frozen=True)
class Wanted:
    """What is asked for.

    Attributes:
        out: the file.
        opset: of ONNX; None: what torch recommends.
        samples: real ones, to compare, and to measure ranges of int8 on.
        tolerance: see `check.compare`.
        check: compare and time it.
        sign: signs the manifest.
        secret: encrypts the file.
        replace: an earlier file.
    """

    kind: Kind
    out: Path
    precision: Precision = "fp32"
    opset: int | None = None
    samples: int = 256
    tolerance: float = 1e-4
    check: bool = True
    sign: "Ed25519PrivateKey | None" = None
    secret: bytes | None = None
    replace: bool = False


@dataclass(frozen=True)
class _Made:
    """What there is to say of a model in its workspace.

    Attributes:
        inputs, outputs: of the program; weights alone have none.
    """

    inputs: tuple[Port, ...] = ()
    outputs: tuple[str, ...] = ()
    opset: int | None = None
    agreement: Agreement | None = None
    latency: tuple[Latency, ...] = ()


def default_name(kind: Kind, precision: Precision, encrypted: bool) -> str:
    """What a model's file is called unless something else was asked for."""
    stem = "model" if precision == "fp32" else f"model.{precision}"
    return f"{stem}{SUFFIXES[kind]}{'.enc' if encrypted else ''}"


def export(source: Source | Trained, wanted: Wanted, tell: Callable[[str], None] = lambda _: None) -> Manifest:
    """Write a model's file with its manifest, whole or not at all.

    Args:
        source: weights alone for `safetensors`, and for that only.
        tell: told, in a line, what is being done.

    Raises:
        InputError: the model cannot be exported so, or the file is there already.
        HotloopError: what was written computes something else, or could not be written.
    """
    _check_asked(wanted)
    with workspace(wanted.out, wanted.replace) as folder:
        path = folder / wanted.out.name
        if isinstance(source, Trained):
            made = _safetensors(source, wanted, path, tell)
        else:
            made = _program(source, wanted, path, tell)
        return publish(folder, wanted.out, partial(_describe, source, wanted, made), wanted.sign, wanted.secret)


def _check_asked(wanted: Wanted) -> None:
    possible = {"onnx": ("fp32", "fp16", "int8"), "tensorrt": ("fp32", "fp16")}.get(wanted.kind, ("fp32",))
    if wanted.precision not in possible:
        cause = f"that has {' and '.join(possible)} alone"
        raise InputError(f"--precision {wanted.precision} with --to {wanted.kind}", cause, "--to onnx")
    if wanted.opset is not None and wanted.kind not in ("onnx", "tensorrt"):
        raise InputError(f"--opset with --to {wanted.kind}", "opsets are versions of ONNX's operators", "--to onnx")
    if wanted.kind == "tensorrt":
        from hotloop.export.tensorrt_engine import require

        require()


def _program(source: Source, wanted: Wanted, path: Path, tell: Callable[[str], None]) -> _Made:
    tell("following the model's computation")
    program, varying = capture(source, _example(source))
    opset, forward = (_package if wanted.kind == "torch" else _onnx)(program, varying, wanted, path, tell)
    made = _Made(_ports(varying), varying.outputs, opset)
    if not forward:
        return made
    tell("comparing outputs with PyTorch's")
    agreement = compare(varying, forward, wanted.precision, wanted.tolerance, wanted.samples)
    tell("timing it")
    return replace(made, agreement=agreement, latency=time_both(source, _ENGINES[wanted.kind], forward))


_Written = tuple[int | None, Forward | None]
"""A program's opset, and what runs it if it is to be checked."""


def _package(
    program: ExportedProgram, source: Source, wanted: Wanted, path: Path, tell: Callable[[str], None]
) -> _Written:  # fmt: skip
    save_package(program, path)
    return None, package_forward(path.read_bytes()) if wanted.check else None


def _onnx(
    program: ExportedProgram, source: Source, wanted: Wanted, path: Path, tell: Callable[[str], None]
) -> _Written:  # fmt: skip
    from hotloop.export.onnx_file import convert, opset_of, write_onnx
    from hotloop.export.predict import onnx_forward

    file = path if wanted.kind == "onnx" else path.with_name("model.onnx")
    tell("translating it to ONNX")
    write_onnx(program, source, file, wanted.opset)
    opset = opset_of(file)
    if wanted.precision != "fp32":
        tell(f"converting it to {wanted.precision}")
        convert(file, wanted.precision, source, wanted.samples)
    if wanted.kind == "onnx":
        return opset, onnx_forward(file) if wanted.check else None
    from hotloop.export.tensorrt_engine import engine_forward, write_engine

    tell("building a TensorRT engine")
    write_engine(file, path, source, _LARGEST_BATCH)
    return opset, engine_forward(path, source) if wanted.check else None


def _safetensors(trained: Trained, wanted: Wanted, path: Path, tell: Callable[[str], None]) -> _Made:
    tell("writing weights")
    tensors = apart({name: tensor.detach().contiguous() for name, tensor in trained.state.items()})
    origin = trained.origin
    described = {
        "format": "pt", "job": origin.job, "model": origin.model, "epoch": str(origin.epoch), "step": str(origin.step),
        "weights": origin.weights, "classes": json.dumps(trained.classes),
    }  # fmt: skip
    path.write_bytes(save(tensors, described))
    if not wanted.check:
        return _Made()
    read = load_file(path)
    differ = [name for name, tensor in tensors.items() if not torch.equal(tensor, read[name])]
    if differ:
        raise HotloopError(f"{path.name} holds other weights", f"{differ[0]} differs as it is read", "see to the disk")
    return _Made(agreement=Agreement(0.0, 0.0, 0, 0))


def _example(source: Source) -> list[Tensor]:
    """A batch of two."""
    tensors = source.arguments(next(source.batches(2)))
    return [tensor if len(tensor) > 1 else torch.cat([tensor, tensor]) for tensor in tensors]


def _ports(source: Source) -> tuple[Port, ...]:
    return tuple(
        Port(
            one.name,
            str(tensor.dtype).removeprefix("torch."),
            tuple(one.varying.get(axis, size) for axis, size in enumerate(tensor.shape)),
        )
        for one, tensor in zip(source.inputs, _example(source), strict=True)
    )


def _describe(source: Source | Trained, wanted: Wanted, made: _Made, files: tuple[StoredFile, ...]) -> Manifest:
    signer = wanted.sign.public_key().public_bytes_raw().hex() if wanted.sign else ""
    return Manifest(
        kind=wanted.kind,
        precision=wanted.precision,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        files=files,
        inputs=made.inputs,
        outputs=made.outputs,
        origin=source.origin,
        versions=_versions(wanted.kind),
        opset=made.opset,
        images=source.images,
        classes=source.classes,
        agreement=made.agreement,
        latency=made.latency,
        signer=signer,
        encryption="aes-256-gcm" if wanted.secret else "",
    )


def _versions(kind: Kind) -> dict[str, str]:
    """Of what it was made with."""
    used = {
        "onnx": ["onnx", "onnxscript", "onnxruntime"],
        "tensorrt": ["onnx", "tensorrt"],
        "safetensors": ["safetensors"],
    }
    found = {"hotloop": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    for name in used.get(kind, []):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
