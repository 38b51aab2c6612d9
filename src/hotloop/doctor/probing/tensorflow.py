"""TensorFlow in a process of its own: whether it starts, what it sees, whether it computes what it should."""

import importlib
import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hotloop.doctor.probing.probes import Measured

_SIZE, _TOLERANCE = 256, 3e-3
"""The tolerance is TF32's."""
_NO_GPU = re.compile(
    r"Could not find cuda drivers[^\n]*|Cannot dlopen some GPU libraries[^\n]*|failed call to cuInit[^\n]*"
    r"|Could not load dynamic library[^\n;]*|Ignoring visible gpu device[^\n]*|Error loading CUDA libraries[^\n]*"
)
"""What TensorFlow writes where it leaves a GPU out (tsl/cuda/cudart_stub.cc, gpu_device.cc, cuda_platform.cc)."""
_LONGEST = 200


def tensorflow(_: str) -> "Measured":
    """Starts, counts GPUs, and computes a product and its gradient on each of them, or on the processor.

    Raises:
        AssertionError: a result is wrong.
    """
    written = _stderr()
    tf: Any = importlib.import_module("tensorflow")
    cards = tf.config.list_physical_devices("GPU")
    for card in cards:  # it takes all memory of all cards otherwise
        tf.config.experimental.set_memory_growth(card, True)
    places = [device.name for device in tf.config.list_logical_devices("GPU" if cards else "CPU")]
    built = tf.test.is_built_with_cuda() or tf.test.is_built_with_rocm()
    yield "GPUs that TensorFlow sees", len(cards), "", _why(written) if built else "it was built without CUDA"
    for place in places:
        for name, wrong in _wrong(tf, place):
            if not wrong <= _TOLERANCE:  # NaN too
                raise AssertionError(f"wrong result of TensorFlow's {name} on {place}: {wrong:.2g} off")


def _wrong(tf: Any, place: str) -> Iterator[tuple[str, float]]:
    """How far a product and its gradient are from NumPy's in float64, of the largest value."""
    import numpy as np

    a, b = np.random.default_rng(0).random((2, _SIZE, _SIZE))
    with tf.device(place), tf.GradientTape() as tape:
        left = tf.Variable(a, dtype=tf.float32)
        product = tf.linalg.matmul(left, tf.constant(b, dtype=tf.float32))
        loss = tf.reduce_sum(tf.square(product))
    gradient = tape.gradient(loss, left)
    for name, got, exact in (("product", product, a @ b), ("gradient", gradient, 2 * (a @ b) @ b.T)):
        yield name, float(np.abs(got.numpy() - exact).max() / np.abs(exact).max())


def _stderr() -> int:
    """From now on what this process writes to standard error, the C++ parts too, goes to memory: its descriptor."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "0"
    written = os.memfd_create("stderr")
    os.dup2(written, 2)
    return written


def _why(written: int) -> str:
    """TensorFlow's own words about GPUs that it leaves out; "" if it wrote none."""
    text = os.pread(written, os.fstat(written).st_size, 0).decode(errors="replace")
    found = _NO_GPU.search(text)
    return found[0][:_LONGEST] if found else ""
