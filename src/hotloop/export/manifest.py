"""What is said of an exported model, in a file beside it; a signature is of that file's bytes."""

from dataclasses import field
from functools import cache
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked

Kind = Literal["onnx", "torch", "safetensors", "tensorrt"]
Precision = Literal["fp32", "fp16", "int8"]
Name = Annotated[str, Field(pattern=r"^[^/\x00]+$", max_length=255)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

FORMAT: Literal[1] = 1
"""Of manifests that this version writes, and the only one that it reads."""

_STRICT = ConfigDict(extra="forbid")


@checked(frozen=True, config=_STRICT)
class StoredFile:
    """A file as it was published.

    Attributes:
        name: in the manifest's folder; of the first, the model itself, what it was called at first.
    """

    name: Name
    bytes: Annotated[int, Field(ge=0)]
    sha256: Digest


@checked(frozen=True, config=_STRICT)
class Port:
    """An input or output.

    Attributes:
        shape: numbers, or names of what may vary.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@checked(frozen=True, config=_STRICT)
class ImageInput:
    """How an image file becomes the model's input, float32 (3, size, size), red green blue.

    Attributes:
        size: height and width, pixels.
        center_crop: side of the square in the middle as a share of the shorter side, before it is resized.
        keep_exact: an image of that size already is taken whole.
        interpolation: of the resizing, on 8 bits a channel.
        mean, std: of each channel, 0 to 1.
        max_pixels: an image of more is refused.
    """

    size: Annotated[int, Field(gt=0, le=8192)]
    center_crop: Annotated[float, Field(gt=0, le=1)]
    keep_exact: bool
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    max_pixels: Annotated[int, Field(gt=0)]
    interpolation: Literal["bilinear, antialiased"] = "bilinear, antialiased"


@checked(frozen=True, config=_STRICT)
class Origin:
    """Which training it is of.

    Attributes:
        run: the name of its directory.
        epoch, step: where the checkpoint was saved.
        weights: "model", or "averaged" for their moving average.
        data: fingerprint of the training data.
        metrics: of the validation there, if there was one.
    """

    job: str
    run: str
    model: str
    epoch: int
    step: int
    weights: Literal["model", "averaged"]
    data: str
    metrics: dict[str, float | None]


@checked(frozen=True, config=_STRICT)
class Agreement:
    """How its outputs compare with those of the model in PyTorch, in fp32.

    Attributes:
        tolerance: what was allowed; None: the precision is another, and the error is only stated.
        random, real: inputs compared, drawn and of the validation data.
        before, after: metrics over the same `samples` of that data, in PyTorch and of this file; empty in fp32.
    """

    max_abs_error: float
    tolerance: float | None
    random: int
    real: int
    samples: int = 0
    before: dict[str, float | None] = field(default_factory=dict)
    after: dict[str, float | None] = field(default_factory=dict)


@checked(frozen=True, config=_STRICT)
class Latency:
    """Time of a batch on the machine of the export, milliseconds: median with lowest and highest of n."""

    engine: str
    batch: int
    median_ms: float
    low_ms: float
    high_ms: float
    n: int


@checked(frozen=True, config=_STRICT)
class Manifest:
    """All that is said of a model.

    Attributes:
        files: the model first.
        images: how image files become inputs; None if they do not.
        signer: the public key that the manifest is signed by, hexadecimal; empty: by none.
        encryption: how the files are encrypted; empty: they are not.
    """

    kind: Kind
    precision: Precision
    created: str
    files: Annotated[tuple[StoredFile, ...], Field(min_length=1, max_length=2)]
    inputs: tuple[Port, ...]
    outputs: tuple[str, ...]
    origin: Origin
    versions: dict[str, str]
    opset: int | None = None
    images: ImageInput | None = None
    classes: tuple[str, ...] = ()
    agreement: Agreement | None = None
    latency: tuple[Latency, ...] = ()
    signer: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    encryption: Literal["", "aes-256-gcm"] = ""
    format: Literal[1] = FORMAT

    def to_bytes(self) -> bytes:
        """As it is written, and signed."""
        return _adapter().dump_json(self, indent=1) + b"\n"

    @property
    def latency_ms(self) -> float | None:
        """Of one sample in this file's own engine; None if it was not measured."""
        return next((one.median_ms for one in self.latency if one.batch == 1 and one.engine != EAGER), None)


EAGER = "pytorch"
"""What `Latency.engine` says of the model as it is in PyTorch."""


def parse(content: bytes) -> Manifest:
    """A manifest from its bytes.

    Raises:
        ValueError: it is none of this format; in one line.
    """
    try:
        return _adapter().validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{where}: {first['msg']}" if where else first["msg"]) from None


@cache
def _adapter() -> TypeAdapter[Manifest]:
    return TypeAdapter(Manifest)
