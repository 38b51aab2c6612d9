"""Which GPUs answer: one that has fallen off the bus, or hangs, does not come back by starting again."""

import os
import subprocess
import sys
from contextlib import suppress

import torch

_LIMIT_SECONDS = 90.0
"""For importing torch and a first sum, on a host that is busy."""
_SUM = "import torch; torch.ones(8, device='cuda').sum().item()"


def answering_gpus() -> list[str]:
    """Of the GPUs that this process may use those that compute, as CUDA_VISIBLE_DEVICES names them.

    Each is asked by a process of its own, all at once; takes about 5 s.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count())]
    asked = {
        name: subprocess.Popen(  # noqa: S603 - the line above
            [sys.executable, "-c", _SUM], env={**os.environ, "CUDA_VISIBLE_DEVICES": name},
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        for name in names
    }  # fmt: skip
    found = []
    for name, process in asked.items():
        with suppress(subprocess.TimeoutExpired):
            if process.wait(_LIMIT_SECONDS) == 0:
                found.append(name)
        process.kill()
    return found
