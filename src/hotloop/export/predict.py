"""An exported image classifier on image files: with onnxruntime, without torch; or with torch, from its package."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from hotloop.core.errors import DamagedSample, HotloopError, InputError
from hotloop.export.artefact import Verified, load
from hotloop.export.images import read_image
from hotloop.export.manifest import ImageInput

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

Forward = Callable[[list[np.ndarray]], list[np.ndarray]]
"""From a model's inputs to its outputs, in its own order."""


@dataclass(frozen=True)
class Prediction:
    """What a model says of one file.

    Attributes:
        classes: the likeliest with their probabilities, 0 to 1, highest first; empty if it could not be read.
        reason: why it could not be read.
    """

    path: str
    classes: tuple[tuple[str, float], ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Classifier:
    """A verified model, ready to run."""

    verified: Verified
    images: ImageInput
    forward: Forward

    def predict(self, paths: Iterable[str], top: int = 1, batch: int = 16) -> Iterator[Prediction]:
        """What it says of files, in their order; of no more than `batch` inputs are in memory at a time.

        Args:
            top: how many of the likeliest classes.
        """
        waiting: list[tuple[str, np.ndarray | str]] = []
        for path in paths:
            try:
                waiting.append((path, read_image(path, self.images)))
            except DamagedSample as damaged:
                waiting.append((path, damaged.reason))
            if len(waiting) == batch:
                yield from self._of(waiting, top)
                waiting = []
        yield from self._of(waiting, top)

    def _of(self, waiting: list[tuple[str, np.ndarray | str]], top: int) -> Iterator[Prediction]:
        read = [found for _, found in waiting if isinstance(found, np.ndarray)]
        rows = iter(probabilities(self.forward([np.stack(read)])[0]) if read else ())
        for path, found in waiting:
            if isinstance(found, str):
                yield Prediction(path, reason=found)
            else:
                yield Prediction(path, self._likeliest(next(rows), top))

    def _likeliest(self, row: np.ndarray, top: int) -> tuple[tuple[str, float], ...]:
        names = dict(enumerate(self.verified.manifest.classes))  # a model may have more outputs than there are classes
        likeliest = np.argsort(-row, kind="stable")[:top].tolist()
        return tuple((names.get(index, str(index)), float(row[index])) for index in likeliest)


def open_classifier(
    model: Path, key: "Ed25519PublicKey | None" = None, secret: bytes | None = None
) -> Classifier:  # fmt: skip
    """Verify a model and make it ready.

    Args:
        key: by which it has to be signed; a `torch` package is not opened without, as it may hold code.
        secret: that it was encrypted with.

    Raises:
        InputError: it is no image classifier of a kind that runs here.
        UnverifiedModel: it is not as it was exported.
    """
    verified, contents = load(model, key, secret)
    manifest = verified.manifest
    if manifest.kind not in ("onnx", "torch"):
        cause = f"it is a {manifest.kind} file, which holds no program" if manifest.kind == "safetensors" else (
            "a TensorRT engine runs by TensorRT alone")  # fmt: skip
        raise InputError(f"{model} cannot be run", cause, "export it with --to onnx")
    if manifest.images is None or not manifest.classes:
        takes = ", ".join(f"{one.name} {list(one.shape)}" for one in manifest.inputs)
        raise InputError(
            f"{model} is no image classifier", f"it takes {takes}; predict makes inputs of image files alone",
            "run it by onnxruntime: its manifest names inputs and outputs",
        )  # fmt: skip
    if manifest.kind == "onnx":
        data = {stored.name: content for stored, content in zip(manifest.files[1:], contents[1:], strict=True)}
        return Classifier(verified, manifest.images, onnx_forward(contents[0], data))
    return Classifier(verified, manifest.images, _torch_forward(model, verified, contents[0]))


def onnx_forward(model: bytes | Path, data: Mapping[str, bytes] = MappingProxyType({})) -> Forward:
    """Run by onnxruntime on the CPU.

    Args:
        model: the file's content; or the file, beside which its data lies.
        data: content of files that the model has weights in, by name.

    Raises:
        InputError: onnxruntime is not installed.
        HotloopError: it cannot run the model.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise InputError(
            "running it needs hotloop[export]", f"{error.name} is not installed", 'pip install "hotloop[export]"'
        ) from None
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors come as exceptions
    if data:
        contents = list(data.values())
        options.add_external_initializers_from_files_in_memory(list(data), contents, [len(one) for one in contents])
    program = model if isinstance(model, bytes) else str(model)
    try:
        session = onnxruntime.InferenceSession(program, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its errors have no class in common but this
        cause = " ".join(str(error).split())[:300]
        fix = "use the onnxruntime that the manifest names, or export it with a lower --opset"
        raise HotloopError("onnxruntime cannot run the model", cause, fix) from error
    names = [one.name for one in session.get_inputs()]

    def forward(inputs: list[np.ndarray]) -> list[np.ndarray]:
        return list(session.run(None, dict(zip(names, inputs, strict=True))))

    return forward


def _torch_forward(model: Path, verified: Verified, content: bytes) -> Forward:
    if not verified.trusted:
        cause = "a package of torch.export may hold code; only one of a known signer is opened"
        raise InputError(f"{model} is not opened without a key", cause, "--key PUBLIC, or export it with --to onnx")
    try:
        from hotloop.export.program import package_forward
    except ImportError as error:
        cause = f"{error.name} is not installed"
        raise InputError("running it needs torch", cause, 'pip install "hotloop[train]"') from None
    return package_forward(content)


def probabilities(logits_BK: np.ndarray) -> np.ndarray:
    """Softmax of each row, in float64."""
    powers = np.exp(logits_BK.astype(np.float64) - logits_BK.max(axis=1, keepdims=True))
    result: np.ndarray = powers / powers.sum(axis=1, keepdims=True)
    return result
