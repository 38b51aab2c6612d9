"""What may be done to a script."""

from collections.abc import Sequence
from dataclasses import dataclass

from hotloop.core.errors import InputError

EXACT, FAST = "exact", "fast"


@dataclass(frozen=True)
class Kind:
    """An acceleration that there is.

    Attributes:
        level: "exact": the mathematics stays the script's own; "fast": it is rounded otherwise.
        what: it does.
        framework: whose scripts it is for.
    """

    name: str
    level: str
    what: str
    framework: str = "torch"


KINDS = (
    Kind("threads", EXACT, "no more threads than processors"),
    Kind("allocator", EXACT, "memory that was freed is kept for the next step"),
    Kind("loader", EXACT, "DataLoader workers that suit this machine, kept between epochs, page-locked batches"),
    Kind("image_folder", EXACT, "an ImageFolder's random crops decoded at the size that is needed"),
    Kind("prefetch", EXACT, "batches copied to the GPU while the step before computes"),
    Kind("cudnn_autotune", EXACT, "cuDNN's fastest algorithm for each convolution"),
    Kind("zero_grad", EXACT, "gradients are dropped instead of being filled with zeros"),
    Kind("memory_growth", EXACT, "TensorFlow: the GPU's memory is taken as it is needed", "tensorflow"),
    Kind("tf_data", EXACT, "TensorFlow: datasets mapped in parallel", "tensorflow"),
    Kind("tf_cache", EXACT, "TensorFlow: datasets that are the same in each pass kept in memory", "tensorflow"),
    Kind("tf32", FAST, "float32 matrix products on tensor cores"),
    Kind("channels_last", FAST, "convolutions in the layout that tensor cores want"),
    Kind("bf16", FAST, "the model's forward under autocast to bfloat16"),
    Kind("compile", FAST, "the model through torch.compile"),
    Kind("fused_optimizer", FAST, "an optimizer's step as one kernel"),
    Kind("mixed_float16", FAST, "TensorFlow: Keras layers compute in 16 bits", "tensorflow"),
)
"""In the order in which they are switched on."""


@dataclass(frozen=True)
class Plan:
    """What is to be done.

    Attributes:
        names: of the accelerations that may be used.
        workers: of DataLoaders; 0: as suits the machine.
        prefetch_factor: batches a worker has under way; 0: torch's own.
        threads: of torch's on the host; 0: as suits the machine.
        measure: switch accelerations on one by one and time each; else all at once, after the first steps.
        steps: that are timed for each; 0: as many as take 3 s.
        asked: each of these was asked for: it is used whether or not it seems to bring something, until it breaks.
        tell: once all is switched on, tell how long steps take, a line each time, until asked to end the process.
    """

    names: tuple[str, ...]
    workers: int = 0
    prefetch_factor: int = 0
    threads: int = 0
    measure: bool = True
    steps: int = 0
    asked: bool = False
    tell: bool = False


def chosen(level: str, only: Sequence[str] = (), without: Sequence[str] = ()) -> tuple[str, ...]:
    """Names of the accelerations of a level, in their order; `only` names them whatever their level.

    Raises:
        InputError: a name is none of them.
    """
    known = [kind.name for kind in KINDS]
    for name in (*only, *without):
        if name not in known:
            raise InputError(f"{name}: no such acceleration", f"there are {', '.join(known)}", "hotloop run --dry-run")
    names = only or [kind.name for kind in KINDS if level == FAST or kind.level == EXACT]
    return tuple(name for name in known if name in names and name not in without)


def kind_of(name: str) -> Kind:
    """The acceleration of that name."""
    return next(kind for kind in KINDS if kind.name == name)
