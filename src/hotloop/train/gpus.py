"""Which GPUs answer: one that has fallen off the bus does not come back by starting again."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

_LIMIT_SECONDS = 90.0
"""For importing torch and a first sum, on a host that is busy."""
_SUM = "import torch; torch.ones(8, device='cuda').sum().item()"


@dataclass(frozen=True)
class Answers:
    """Names of GPUs, as CUDA_VISIBLE_DEVICES takes them.

    Attributes:
        asked: those that this process may use.
        answered: those of them that compute.
    """

    asked: Sequence[str]
    answered: Sequence[str]


def answering_gpus() -> Answers:
    """Ask each GPU for a sum, by a process of its own, all at once: 5 s, and 90 s if one hangs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    asked = visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count())]
    until = time.monotonic() + _LIMIT_SECONDS
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name in asked:
            processes[name] = subprocess.Popen(  # noqa: S603 - the line above
                [sys.executable, "-P", "-c", _SUM], env={**os.environ, "CUDA_VISIBLE_DEVICES": name},
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        return Answers(asked, [name for name in asked if _succeeds(processes[name], until)])
    finally:
        for process in processes.values():
            process.kill()
            with suppress(subprocess.TimeoutExpired):  # one that the driver holds does not end
                process.wait(1)


def _succeeds(process: "subprocess.Popen[bytes]", until: float) -> bool:
    try:
        return process.wait(max(0.0, until - time.monotonic())) == 0
    except subprocess.TimeoutExpired:
        return False
