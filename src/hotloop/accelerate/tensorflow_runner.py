"""What is done to a script that trains with TensorFlow, when it imports it. Nothing of torch is needed."""

import atexit
import json
import os
import re
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
    runner = TensorFlowRunner(tf, Plan(**attachment.settings), Path(attachment.folder))
    runner.start()


class TensorFlowRunner:
    """Accelerates TensorFlow in one process.

    Args:
        tf: the module tensorflow.
        folder: where what came of it is written.
    """

    def __init__(self, tf: Any, plan: Plan, folder: Path) -> None:
        self._tf = tf
        self._names = plan.names
        self._folder = folder
        self._process = os.getpid()
        self._told: list[Acceleration] = []
        caches = "tf_cache" in plan.names
        self._pipelines = Pipelines(tf, "tf_data" in plan.names, int(_CACHE_SHARE * free_bytes()) if caches else 0)

    def start(self) -> None:
        if (
            "memory_growth" in self._names
        ):  # TensorFlow reads it when it first uses a GPU; asking for one would be a use
            os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
        if "mixed_float16" in self._names:
            unfit = mix_precision(self._tf, self._tf.config.list_physical_devices("GPU"))
            self._tell("mixed_float16", unfit, 1)
        self._pipelines.install()
        save_on_sigterm()
        atexit.register(self._leave)

    def _tell(self, name: str, unfit: str, acted: int) -> None:
        kind = kind_of(name)
        state = UNFIT if unfit or not acted else ON
        self._told.append(Acceleration(name, kind.level, state, count=0 if unfit else acted, why=unfit or kind.what))

    def _leave(self) -> None:
        if os.getpid() != self._process:
            return
        done, gpus = self._pipelines, self._tf.config.list_physical_devices("GPU")
        if "memory_growth" in self._names:
            self._tell("memory_growth", "" if gpus else "there is no GPU", len(gpus))
        if "tf_data" in self._names:
            self._tell(
                "tf_data", "" if done.mapped else "no dataset is mapped in the order of its elements", done.mapped
            )
        if "tf_cache" in self._names:
            nothing = "" if done.cached else "no dataset is the same in each pass, of known size, and small enough"
            self._tell("tf_cache", nothing, done.cached)
        notes = ["not timed: TensorFlow is told before its first step"]
        if done.left:
            notes.append(f"{count(done.left, 'map')} of random numbers or Python: called in order, as before")
        found = {
            "device": "cuda" if gpus else "cpu",
            "steps": 0,
            "accelerations": [asdict(one) for one in self._told],
            "notes": notes,
        }
        (self._folder / f"speedup-tensorflow-{self._process}.json").write_text(json.dumps(found))


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
