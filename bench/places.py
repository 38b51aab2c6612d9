"""A machine in parts, so that benches which need one GPU each run side by side."""

import os
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """GPUs, or none, and the processors beside them."""

    gpus: tuple[str, ...]
    processors: frozenset[int]

    def take(self) -> None:
        """What this thread starts from now on has these processors."""
        os.sched_setaffinity(0, self.processors)

    @property
    def environment(self) -> Mapping[str, str]:
        """Our variables as they are when they are read, and these GPUs alone."""
        return ChainMap({"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)} if self.gpus else {}, os.environ)


def places(gpus: int) -> list[Place]:
    """The machine in equal parts, one for each GPU; without any, one part that is all of it."""
    processors = sorted(os.sched_getaffinity(0))
    if not gpus:
        return [Place((), frozenset(processors))]
    share = len(processors) // gpus
    names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")[:gpus]
    return [Place((name,), frozenset(processors[n * share : (n + 1) * share])) for n, name in enumerate(names)]


def together(parts: Sequence[Place]) -> Place:
    """Parts as one."""
    gpus = tuple(name for part in parts for name in part.gpus)
    return Place(gpus, frozenset(number for part in parts for number in part.processors))
