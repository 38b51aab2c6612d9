"""What a training step does besides forward and backward."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StepSettings:
    """What a step does besides forward and backward.

    Attributes:
        precision: fp32, tf32, bf16, fp16 (with loss scaling), or float8 (the model's linear layers converted before).
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
