"""TensorBoard's writer of events, without TensorFlow."""

import sys
from types import ModuleType


def without_tensorflow() -> None:
    """Have tensorboard write files by its own means, as it does where there is no TensorFlow: importing that takes 7 s
    and 300 MB. To be called before tensorboard is imported; a process that uses TensorFlow anyway is left as it is.
    """
    if "tensorflow" not in sys.modules:
        name = "tensorboard.compat.notf"  # looked for by tensorboard.compat
        sys.modules.setdefault(name, ModuleType(name))
