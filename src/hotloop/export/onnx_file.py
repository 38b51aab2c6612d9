"""A program as an ONNX file: in fp32, in fp16, or in int8."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_ir
import torch
from onnx_ir.passes.common import ClearMetadataAndDocStringPass
from torch.export import ExportedProgram

from hotloop.core.errors import InputError
from hotloop.export.artefact import DATA, beside
from hotloop.export.manifest import Precision
from hotloop.export.program import first_line, quiet
from hotloop.export.source import Source

INLINE_BYTES = 2**31 - 2**24
"""Weights of more lie in a file of their own: protobuf ends at 2 GB, and there is more in it than weights."""


def write_onnx(
    program: ExportedProgram, source: Source, path: Path, opset: int | None, inline: int = INLINE_BYTES
) -> None:
    """Write a program as ONNX, without the names of files that it was made from.

    Args:
        opset: the version of ONNX's operators; None: what torch recommends.
        inline: bytes of weights from which on they lie in a file of their own.

    Raises:
        InputError: an operation has no equivalent, or there is no such opset.
    """
    names = [one.name for one in source.inputs]
    axes = tuple(dict(one.varying) for one in source.inputs)
    try:
        with quiet():
            made = torch.onnx.export(
                program, (), input_names=names, output_names=list(source.outputs), opset_version=opset,
                dynamic_shapes=axes, verbose=False,
            )  # fmt: skip
    except Exception as error:
        raise _no_equivalent(error) from error
    assert made is not None
    model = made.model
    got = model.opset_imports[""]
    if opset is not None and got != opset:
        cause = f"torch wrote opset {got}, which cannot be turned into {opset}; onnx knows up to "
        raise InputError(
            f"--opset {opset} is not supported", f"{cause}{onnx.defs.onnx_opset_version()}",
            f"--opset {got}, or leave it out",
        )  # fmt: skip
    ClearMetadataAndDocStringPass()(model)
    weights = sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value)
    data = beside(path, DATA).name if weights > inline else None
    onnx_ir.save(model, path, external_data=data, size_threshold_bytes=2**10)


def opset_of(path: Path) -> int:
    """The version of ONNX's own operators that a file asks for."""
    model = onnx.load(path, load_external_data=False)
    return next(int(one.version) for one in model.opset_import if not one.domain)


def convert(path: Path, precision: Precision, source: Source, samples: int) -> None:
    """Turn an fp32 file into one of another precision, in its place; inputs and outputs stay as they are.

    Args:
        samples: of the validation data, to measure the ranges of int8 on.

    Raises:
        InputError: it has its weights in a file of their own.
    """
    if beside(path, DATA).exists():
        cause = "its weights take more than 2 GB, which is converted in fp32 alone"
        raise InputError(f"--precision {precision} is not possible", cause, "--precision fp32")
    if precision == "fp16":
        _to_fp16(path)
    elif precision == "int8":
        _to_int8(path, source, samples)


def _to_fp16(path: Path) -> None:
    from onnxruntime.transformers.float16 import convert_float_to_float16

    with quiet():
        onnx.save(convert_float_to_float16(onnx.load(path), keep_io_types=True), path)


def _to_int8(path: Path, source: Source, samples: int) -> None:
    """Weights and activations, with ranges as they are met; per channel."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        """Real inputs, batch by batch."""

        def __init__(self) -> None:
            self._batches = self._read()

        def _read(self) -> Iterator[dict[str, np.ndarray]]:
            names = [one.name for one in source.inputs]
            for batch in source.batches(samples):
                yield dict(zip(names, (tensor.numpy() for tensor in source.arguments(batch)), strict=True))

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self._batches, None)

    ready = beside(path, ".ready")
    with quiet():
        quant_pre_process(path, ready, skip_symbolic_shape=True)
        quantize_static(
            ready, path, Reader(), quant_format=QuantFormat.QDQ, per_channel=True, weight_type=QuantType.QInt8,
            activation_type=QuantType.QUInt8,
        )  # fmt: skip
    ready.unlink()


def _no_equivalent(error: Exception) -> InputError:
    """The operation that stands in the way is named by one of the causes."""
    causes: list[str] = []
    current: BaseException | None = error
    while current is not None and len(causes) < 10:
        causes.append(str(current))
        current = current.__cause__
    found = next((found for text in reversed(causes) if (found := re.search(r"torch\.ops\.([\w.]+)", text))), None)
    cause = f"ONNX has nothing for the operation {found[1]}" if found else first_line(causes[-1])
    fix = "compute it by other operations; --to torch and --to safetensors need no equivalent"
    return InputError("the model cannot be exported to ONNX", cause, fix)
