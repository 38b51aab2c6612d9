"""What a process has taken: its processor's time, and memory. And that process: the first of so many ranks."""

import time
from pathlib import Path
from typing import Any

from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from hotloop.train.world import World

Measured = dict[str, Any]

processor_seconds = time.process_time
"""Of this process: what else runs on the machine takes none of it."""


class Peak:
    """How much more memory than before this process had at most."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self._before = self._status("VmRSS")

    def bytes(self) -> int:
        return max(0, self._status("VmHWM") - self._before)

    def _status(self, name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def first_of(ranks: int) -> World:
    distributed.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    return World(size=ranks, group=distributed.group.WORLD)
