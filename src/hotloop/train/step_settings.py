"""What a training step does besides forward and backward."""

from dataclasses import dataclass

from hotloop.core.errors import InputError

_PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "float8")
_COMPILED = ("", "model", "blocks")


@dataclass(frozen=True)
class StepSettings:
    """What a step does besides forward and backward.

    Attributes:
        precision: fp32, tf32, bf16, fp16 (with loss scaling), or float8 (the model's linear layers converted before, by
            `hotloop.train.precision.use_float8`). Of fp32 and tf32 torch's own switches decide, which are the whole
            process's (`torch.backends.fp32_precision`): a job sets them, a step leaves them.
        clip_norm: largest norm of all gradients together, after unscaling; 0: none.
        ema: decay of the averaged weights; 0: none.
        compile: "model", "blocks" (its repeated blocks), or nothing.
        own_kernels: with compile on a GPU, put hotloop's kernels into the model where they fit.
        graph: capture the step into a CUDA graph where that is possible.
        recover: when memory runs out, repeat the same window in smaller pieces.
        pad_to: lengthen shorter batches, dicts of tensors, to so many samples; the loss then finds which are real in
            `batch["valid"]`, bool (B,), and must be the mean over those. 0: batches stay as they are.
        compress: gradients of a model in `DistributedDataParallel` travel as bfloat16.
    """

    precision: str = "fp32"
    clip_norm: float = 0.0
    ema: float = 0.0
    compile: str = ""
    own_kernels: bool = True
    graph: bool = True
    recover: bool = True
    pad_to: int = 0
    compress: bool = False

    def __post_init__(self) -> None:
        """Refuse what would be taken for something else.

        Raises:
            InputError: a setting has a value that it cannot have.
        """
        known = {"precision": _PRECISIONS, "compile": _COMPILED}
        for name, values in known.items():
            if getattr(self, name) not in values:
                _refuse(name, getattr(self, name), f"it is one of {', '.join(map(repr, values))}", repr(values[0]))
        if not self.clip_norm >= 0:  # NaN is not
            _refuse("clip_norm", self.clip_norm, "a norm is 0 (none) or more", "1.0")
        if not 0 <= self.ema < 1:
            _refuse("ema", self.ema, "a decay is 0 (none) or more, and less than 1", "0.999")
        if self.pad_to < 0:
            _refuse("pad_to", self.pad_to, "it is a number of samples, or 0", "0")


def _refuse(name: str, value: object, cause: str, fix: str) -> None:
    raise InputError(f"StepSettings({name}={value!r})", cause, f"{name}={fix}")
