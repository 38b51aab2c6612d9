"""For code that trains with TensorFlow: what `hotloop run` does to a script from outside, by a call."""

from collections.abc import Sequence
from importlib import import_module

from hotloop.accelerate.plan import EXACT, chosen, kind_of
from hotloop.accelerate.tensorflow_runner import TensorFlowRunner
from hotloop.core.speedup import Acceleration as Acceleration

_begun: list[TensorFlowRunner] = []


def accelerate(level: str = EXACT, only: Sequence[str] = (), without: Sequence[str] = ()) -> TensorFlowRunner:
    """Let TensorFlow take the GPU's memory as it needs it, map datasets in parallel and keep them in memory; at level
    "fast" Keras layers compute in 16 bits, too.

    To be called before a GPU is used and a model or a dataset is made; called again, it begins anew. Elements, their
    order and random numbers stay what they are, at level "exact".

    Args:
        level: "exact" or "fast".
        only: names of accelerations: "memory_growth", "tf_data", "tf_cache", "mixed_float16".
        without: names of those that are left out.

    Returns:
        What has begun: `told` says what each acceleration has done so far, `stop()` leaves later datasets alone.

    Raises:
        InputError: a name is none of them.
    """
    names = [name for name in chosen(level, only, without) if kind_of(name).framework == "tensorflow"]
    runner = TensorFlowRunner(import_module("tensorflow"), names)
    while _begun:
        _begun.pop().stop()
    runner.start()
    _begun.append(runner)
    return runner
