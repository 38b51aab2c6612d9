"""An exported model without torch: a tiny classifier as ONNX, described, signed and encrypted as asked."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from hotloop.export.artefact import publish, workspace
from hotloop.export.manifest import ImageInput, Manifest, Origin, Port, StoredFile

IMAGES = ImageInput(16, 0.875, False, (0.5, 0.4, 0.3), (0.2, 0.25, 0.3), 10**6)
CLASSES = ("class0", "class1")


def onnx_bytes() -> bytes:
    """The mean of each channel, and a linear layer that tells bright from dark."""
    weight = np.array([[-1, 1]] * 3, np.float32)
    nodes = [
        helper.make_node("GlobalAveragePool", ["images"], ["mean"]),
        helper.make_node("Flatten", ["mean"], ["flat"]),
        helper.make_node("MatMul", ["flat", "weight"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes,
        "bright",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, ["batch", 3, 16, 16])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 2])],
        [numpy_helper.from_array(weight, "weight")],
    )
    made: bytes = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10
    ).SerializeToString()
    onnx.checker.check_model(made)
    return made


def write_model(out: Path, sign: Any = None, secret: bytes | None = None, **changes: Any) -> Path:
    """Publish the classifier as an export does; `changes` are of its manifest."""

    def describe(files: tuple[StoredFile, ...]) -> Manifest:
        origin = Origin("bright", "bright-1", "tiny", 1, 10, "model", "0" * 64, {"val_accuracy": 1.0})
        port = Port("images", "float32", ("batch", 3, 16, 16))
        known: dict[str, Any] = {"images": IMAGES, "classes": CLASSES, "inputs": (port,), "kind": "onnx", **changes}
        return Manifest(
            precision="fp32", created="2026-11-23T00:00:00+00:00", files=files, outputs=("logits",), origin=origin,
            versions={}, signer=sign.public_key().public_bytes_raw().hex() if sign else "",
            encryption="aes-256-gcm" if secret else "", **known,
        )  # fmt: skip

    with workspace(out, replace=True) as folder:
        (folder / out.name).write_bytes(onnx_bytes())
        publish(folder, out, describe, sign, secret)
    return out
