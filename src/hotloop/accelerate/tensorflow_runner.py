"""What is done to a script that trains with TensorFlow, when it imports it. Nothing of torch is needed."""

import atexit
import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hotloop.accelerate.plan import Plan, kind_of
from hotloop.accelerate.tensorflow_data import Pipelines
from hotloop.accelerate.termination import save_on_sigterm
from hotloop.attach.inside import Attachment
from hotloop.core.machine import usable_memory_bytes
from hotloop.core.speedup import ON, UNFIT, Acceleration
from hotloop.core.units import count

_CACHE_SHARE = 0.25
"""Of the memory that is free."""


def begin(tf: Any, attachment: Attachment) -> None:
    """Set what a script's TensorFlow starts with, and change its pipelines from now on."""
    runner, process = TensorFlowRunner(tf, Plan(**attachment.settings).names), os.getpid()
    runner.start()
    save_on_sigterm()

    def leave() -> None:
        if os.getpid() == process:
            found = {"rank": 0, "device": "cuda" if runner.has_gpus else "cpu", "steps": 0, "notes": runner.notes}
            accelerations = [asdict(one) for one in runner.told]
            file = Path(attachment.folder, f"speedup-tensorflow-{process}.json")
            file.write_text(json.dumps({**found, "accelerations": accelerations}))

    atexit.register(leave)


class TensorFlowRunner:
    """Accelerates TensorFlow in this process.

    Args:
        tf: the module tensorflow.
        names: of accelerations.
    """

    def __init__(self, tf: Any, names: Sequence[str]) -> None:
        self._tf = tf
        self._names = names
        self._no_precision = ""
        caches = "tf_cache" in names
        self._pipelines = Pipelines(tf, "tf_data" in names, int(_CACHE_SHARE * free_bytes()) if caches else 0)

    def start(self) -> None:
        """From now on; memory and precision only hold if no GPU has been used and no model been made yet."""
        if "memory_growth" in self._names:  # read when a GPU is first used; asking for one would be a use
            os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
        if "mixed_float16" in self._names:
            self._no_precision = mix_precision(self._tf, self._tf.config.list_physical_devices("GPU"))
        self._pipelines.install()

    def stop(self) -> None:
        """Datasets that are made from now on are as they are written; memory and precision stay."""
        self._pipelines.remove()

    @property
    def has_gpus(self) -> bool:
        return bool(self._tf.config.list_physical_devices("GPU"))

    @property
    def told(self) -> tuple[Acceleration, ...]:
        """What each has done so far, or why nothing."""
        done = self._pipelines
        found = {
            "mixed_float16": (int(not self._no_precision), self._no_precision),
            "memory_growth": (len(self._tf.config.list_physical_devices("GPU")), "there is no GPU"),
            "tf_data": (done.mapped, "no dataset is mapped in the order of its elements"),
            "tf_cache": (done.cached, "no dataset is the same in each pass, of known size, and small enough"),
        }
        return tuple(_acceleration(name, *found[name]) for name in found if name in self._names)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader has to know besides."""
        left = f"{count(self._pipelines.left, 'map')} of random numbers or Python: called in order, as before"
        return ("not timed: TensorFlow is told before its first step", *([left] if self._pipelines.left else []))


def _acceleration(name: str, acted: int, nothing: str) -> Acceleration:
    kind = kind_of(name)
    return Acceleration(name, kind.level, ON if acted else UNFIT, count=acted, why=kind.what if acted else nothing)


def mix_precision(tf: Any, gpus: list[Any]) -> str:
    """Have Keras layers compute in 16 bits. Returns why they do not; empty if they do."""
    if not gpus:
        return "there is no GPU"
    policy = policy_for(min(tf.config.experimental.get_device_details(gpu)["compute_capability"] for gpu in gpus))
    if policy:
        tf.keras.mixed_precision.set_global_policy(policy)
    return "" if policy else "tensor cores came with compute capability 7.0"


def policy_for(capability: tuple[int, int]) -> str:
    """Keras' policy for a card. With bfloat16 no loss has to be scaled, which loops of one's own do not do."""
    if capability >= (8, 0):
        return "mixed_bfloat16"
    return "mixed_float16" if capability >= (7, 0) else ""


def free_bytes() -> int:
    """Memory of the host that is free, and that this container may use."""
    found = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
    return min(1024 * int(found[1]) if found else 0, usable_memory_bytes())
