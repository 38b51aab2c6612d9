"""Which settings there are to try, on a machine, for a job or a script."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hotloop.accelerate.plan import EXACT, KINDS
from hotloop.core.job import Job
from hotloop.core.tuning import Settings, Value

_MOST_WORKERS = 64
_WITH_NUMBERS = ("loader", "threads")
"""Accelerations of `hotloop run` whose own settings are searched instead."""


@dataclass(frozen=True)
class Knob:
    """A setting.

    Attributes:
        name: a job's key, such as "speed.compile"; or of `hotloop run`.
        values: that may be tried; the first is what stands there now.
        rises: whether they are numbers that rise from the second on, and speed rises with them to some point.
        counts: whether the first is such a number, too, and not a word for what there is.
        needs: another setting, without a change of which the values in `needing` bring nothing.
    """

    name: str
    values: tuple[Value, ...]
    rises: bool = False
    counts: bool = False
    needs: str = ""
    needing: tuple[Value, ...] = ()


def start_of(space: Sequence[Knob]) -> Settings:
    """The settings as they are now."""
    return {knob.name: knob.values[0] for knob in space}


def size_of(space: Sequence[Knob]) -> int:
    """How many settings there are in all."""
    return math.prod(len(knob.values) for knob in space)


@dataclass(frozen=True)
class Surroundings:
    """What of a machine and its environment decides which settings there are.

    Attributes:
        gpu: whether it trains on one.
        nodes: whether its processors lie on several memory nodes.
        allocator: whether nobody has said how torch's is to be.
    """

    processors: int
    gpu: bool
    nodes: bool = False
    allocator: bool = True


def job_space(job: Job, place: Surroundings, read: bool, images: bool) -> tuple[Knob, ...]:
    """What can be tried for a job as resolved. The learning rate and the samples a step stay as they are.

    Args:
        read: whether its data is read from files while it trains.
        images: whether those are images.
    """
    processors, gpu = place.processors, place.gpu
    knobs = []
    if read:
        knobs.append(
            Knob("data.workers", _first(job.data.workers, (0, *_workers(processors))), rises=True, counts=True)
        )
        if gpu and images:
            knobs.append(Knob("data.decode", _first(job.data.decode, ("cpu", "hardware", "dali"))))
    compiled = "" if job.speed.compile else "speed.compile"
    kernels = _first(job.speed.kernels, (True, False))
    precisions = _first(job.precision, ("fp32", "tf32", "bf16", "float8") if gpu else ("fp32", "bf16"))
    knobs += [
        # Only what is compiled scales to float8 and multiplies in one kernel.
        Knob("precision", precisions, needs=compiled, needing=("float8",)),
        Knob("speed.channels_last", _first(job.speed.channels_last, (False, True))),
        Knob("threads", (0, *sorted({processors, max(1, processors // 2)}))),
    ]
    if gpu:
        knobs += [
            Knob("speed.kernels", kernels, needs=compiled, needing=kernels[1:]),  # only of what is compiled
            Knob("speed.cudnn_benchmark", _first(job.speed.cudnn_benchmark, (True, False))),
            Knob("speed.graph", _first(job.speed.graph, (True, False))),
            Knob("speed.activations", _first(job.speed.activations, ("keep", "selective", "blocks"))),
        ]
        if place.allocator:
            knobs.append(Knob("expandable_segments", (True, False)))
    else:
        knobs.append(Knob("speed.keep_memory", _first(job.speed.keep_memory, (True, False))))
    if place.nodes:
        knobs.append(Knob("numa", (False, True)))
    # After what is tried in seconds: to compile takes half a minute, and again for each of those that changes the code.
    knobs.append(Knob("speed.compile", _first(job.speed.compile, (False, True, "blocks"))))
    knobs.append(Knob("train.accumulate", _portions(job)))
    return tuple(knob for knob in knobs if len(knob.values) > 1)


def _first(now: Value, values: Sequence[Value]) -> tuple[Value, ...]:
    return (now, *(value for value in values if value != now))


def _workers(processors: int) -> list[int]:
    """Few, as many as there are processors, and more, for those that wait for a disk."""
    few = {1, max(1, processors // 2), max(1, processors - 1)}
    return sorted({min(_MOST_WORKERS, each) for each in (*few, *(processors * 2**power for power in range(4)))})


def _portions(job: Job) -> tuple[int, ...]:
    """In how many batches the samples of a step may come: as now, halved or doubled, if they divide evenly."""
    now, samples = job.train.accumulate, job.train.accumulate * job.data.batch_size
    others = [each for each in (now // 2, now * 2) if each >= 1 and samples % each == 0]
    return (now, *others)


def script_space(processors: int, level: str) -> tuple[Knob, ...]:
    """What can be tried for a script: the accelerations of `hotloop run`, on or off, and their numbers."""
    knobs = [
        Knob("workers", (0, *_workers(processors)), rises=True),
        Knob("prefetch_factor", (0, 4), needs="workers", needing=(4,)),
        Knob("threads", (0, *sorted({1, max(1, processors // 2), processors}))),
    ]
    for kind in (kind for kind in KINDS if kind.framework == "torch"):
        if kind.name not in _WITH_NUMBERS and (kind.level == EXACT or level != EXACT):
            knobs.append(Knob(kind.name, (False, True)))
    return tuple(knobs)
