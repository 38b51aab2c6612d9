"""What a trace says: at each moment of some steps, what was going on."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotloop.core.profile import KINDS, Operator
from hotloop.profile.intervals import Interval, covers, difference, intersection, length, union

_COLLECTIVES = ("nccl", "gloo", "c10d::", "mpi:")
_WAITING_CALLS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cuStreamSynchronize")
_ALLOCATING_CALLS = ("cudaMalloc", "cudaFree", "cudaHostAlloc", "cuMem")
_CALLS = ("cuda_runtime", "cuda_driver")
_CUDA = 1
"""Number of the kind of device, as torch has it."""
_POINTS = 400
_PYTHON_SECONDS = 5e-4
"""From which on a stretch in which the host is not inside of torch counts as the script's own doing, not as its way
from one operation to the next.
"""


@dataclass(frozen=True)
class Event:
    """Something in a trace; times in seconds.

    Attributes:
        kind: torch's category, such as "cpu_op", "kernel", "gpu_memcpy", "user_annotation", "cuda_runtime"; "memory"
            and "gpu_memory" where something was allocated or freed.
        allocated_bytes: in all tensors from then on, of those kinds.
        correlation: what a call of the host's and the work on the GPU that it has asked for have in common; 0: nothing.
    """

    name: str
    kind: str
    begin: float
    end: float
    thread: object = 0
    allocated_bytes: int = 0
    correlation: int = 0


@dataclass(frozen=True)
class Timeline:
    """Some steps of a training.

    Attributes:
        steps: how many.
        span: from the first mark to the last, each when the GPU has reached it.
        times: by kind, when it was what held the training up; together they are all of the span.
        operators: the longest first.
        gpu_idle: share of the span in which the GPU did nothing; 0 without one.
        memory: moments and the bytes that were in tensors from then on; on the GPU where there is one.
        added: seconds by which a step was longer than without a trace.
    """

    steps: int
    span: Interval
    times: Mapping[str, Sequence[Interval]]
    operators: tuple[Operator, ...]
    gpu_idle: float = 0.0
    memory: tuple[tuple[float, int], ...] = ()
    added: float = 0.0

    def seconds(self, kind: str) -> float:
        """Of a kind, a step."""
        return length(self.times.get(kind, ())) / self.steps


def read_trace(file: Path) -> list[Event]:
    """The events of a Chrome trace as torch writes it."""
    found = []
    for event in json.loads(file.read_text())["traceEvents"]:
        if event.get("ph") == "X":
            begin, end = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
            number = event.get("args", {}).get("correlation", 0)
            found.append(Event(event["name"], event.get("cat", ""), begin, end, event["tid"], correlation=number))
        elif event.get("name") == "[memory]":
            told, moment = event["args"], event["ts"] / 1e6
            kind = "gpu_memory" if told["Device Type"] == _CUDA else "memory"
            found.append(Event("[memory]", kind, moment, moment, event["tid"], int(told["Total Allocated"])))
    return found


def timeline(events: Sequence[Event], step_seconds: float = 0.0) -> Timeline | None:
    """Divide the steps between marks; None if there are fewer than two.

    Args:
        step_seconds: a step's without a profiler, which makes the host slower; 0: as long as here.
    """
    marks = sorted((event.begin, event.thread) for event in events if _is_mark(event))
    if len(marks) < 2:
        return None
    gpu = [event for event in events if event.kind in ("kernel", "gpu_memcpy", "gpu_memset")]
    span, thread = (_reached(marks[0][0], events, gpu), _reached(marks[-1][0], events, gpu)), marks[0][1]
    inside = [event for event in events if event.end > span[0] and event.begin < span[1]]
    gpu = [event for event in gpu if event.end > span[0] and event.begin < span[1]]
    ranges = defaultdict(list)
    for event in inside:
        if event.name.startswith("hotloop::") and event.kind == "user_annotation" and event.thread == thread:
            ranges[event.name.removeprefix("hotloop::")].append((event.begin, event.end))
    said = {name: union(found) for name, found in ranges.items()}
    steps = len(marks) - 1
    added = max(0.0, span[1] - span[0] - steps * step_seconds) if step_seconds else 0.0
    times = _with_gpu(span, inside, gpu, said, added) if gpu else _without_gpu(span, inside, said)
    busy = length(intersection(union((event.begin, event.end) for event in gpu), [span]))
    idle = 1 - busy / (span[1] - span[0]) if gpu else 0.0
    memory = _memory([event for event in inside if event.kind == ("gpu_memory" if gpu else "memory")], span)
    return Timeline(steps, span, times, _operators(gpu or _outermost(inside), steps), idle, memory, added / steps)


def _is_mark(event: Event) -> bool:
    return event.name == "hotloop::mark" and event.kind == "user_annotation"


def _reached(mark: float, events: Sequence[Event], gpu: Sequence[Event]) -> float:
    """When all is done that was asked for before a mark: the host may be many steps ahead of the GPU."""
    asked = {event.correlation: event.begin for event in events if event.kind in _CALLS and event.correlation}
    return max([mark, *(event.end for event in gpu if asked.get(event.correlation, event.begin) < mark)])


def _memory(events: Sequence[Event], span: Interval) -> tuple[tuple[float, int], ...]:
    """Moments and bytes, the most of each of a bounded number of stretches."""
    most: dict[int, int] = {}
    for event in events:
        place = int((event.begin - span[0]) / (span[1] - span[0]) * _POINTS)
        most[place] = max(most.get(place, 0), event.allocated_bytes)
    return tuple((span[0] + (span[1] - span[0]) * place / _POINTS, held) for place, held in sorted(most.items()))


def _without_gpu(span: Interval, events: Sequence[Event], said: Mapping[str, list[Interval]]) -> dict[str, Any]:
    operators = [event for event in events if event.kind == "cpu_op"]
    return _in_order(
        span,
        {
            "input": said.get("input", []),
            "compute": _times(event for event in operators if not _is_collective(event)),
            "communication": _times(event for event in events if _is_collective(event)),
        },
    )


def _with_gpu(
    span: Interval, events: Sequence[Event], gpu: Sequence[Event], said: Mapping[str, list[Interval]], added: float
) -> dict[str, Any]:
    """While the GPU works, its work; while it rests, what the host is at, which takes so much longer for the trace.

    A copy to the host that this waits for is no work: without the read there is none.
    """
    copies = [event for event in gpu if event.kind == "gpu_memcpy" and "HtoD" in event.name]
    # Backward runs in a thread of its own.
    calls = [event for event in events if event.kind in ("cpu_op", *_CALLS)]
    python = [gap for gap in difference([span], _times(calls)) if gap[1] - gap[0] >= _PYTHON_SECONDS]
    waits = union([*said.get("sync", []), *((e.begin, e.end) for e in calls if e.name.startswith(_WAITING_CALLS))])
    read = _read_by_waiting(gpu, calls, waits)
    working = [event for event in gpu if event not in read]
    computing = [event for event in working if not _is_collective(event) and "HtoD" not in event.name]
    return _in_order(
        span,
        {
            "compute": _times(computing),
            "communication": _times(event for event in gpu if _is_collective(event)),
            "copy": _times(copies),
            "input": said.get("input", []),
            "compiling": said.get("compiling", []),
            "copying": said.get("copy", []),
            "allocating": _times(event for event in calls if event.name.startswith(_ALLOCATING_CALLS)),
            "communicating": _times(event for event in events if _is_collective(event)),
            "sync": _lost_by_waiting(span, _times(working), _times(read), waits, added),
            "python": python,
        },
        rest="launch",
    )


def _read_by_waiting(gpu: Sequence[Event], calls: Sequence[Event], waits: Sequence[Interval]) -> set[Event]:
    """Copies to the host that were asked for in a wait, as `.item()` does; others go on without it."""
    asked = {event.correlation: event.begin for event in calls if event.kind in _CALLS and event.correlation}
    copies = (event for event in gpu if event.kind == "gpu_memcpy" and "DtoH" in event.name)
    return {event for event in copies if covers(waits, asked.get(event.correlation, event.begin))}


def _lost_by_waiting(
    span: Interval, working: Sequence[Interval], reads: Sequence[Interval], waits: Sequence[Interval], added: float
) -> list[Interval]:
    """When the GPU does what is read, or rests because the host has waited for it and would not have rested otherwise:
    without waits a step takes as long as what the host does besides, or as the GPU's own work, whichever is longer.
    """
    alone = intersection(difference(reads, working), [span])
    rests = difference([span], union([*working, *reads]))
    after = union([*(gap for gap in rests if covers(waits, gap[0])), *intersection(rests, waits)])
    whole = span[1] - span[0] - added
    lost = whole - max(whole - length(intersection(waits, [span])), length(intersection(working, [span])))
    part = max(0.0, min(1.0, (lost - length(alone)) / length(after))) if after else 0.0
    return union([*alone, *((begin, begin + part * (end - begin)) for begin, end in after)])


def _in_order(span: Interval, found: Mapping[str, Sequence[Interval]], rest: str = "other") -> dict[str, Any]:
    """Each moment to the first that claims it."""
    named = {"copying": "copy", "communicating": "communication"} | dict.fromkeys(
        ("compiling", "allocating", "python"), "other"
    )
    left: list[Interval] = [span]
    times: dict[str, Any] = {kind: [] for kind in KINDS}
    for name, intervals in found.items():
        kind = named.get(name, name)
        times[kind] = union([*times[kind], *intersection(left, intervals)])
        left = difference(left, intervals)
    times[rest] = union([*times[rest], *left])
    return times


def _times(events: Iterable[Event]) -> list[Interval]:
    return union((event.begin, event.end) for event in events)


def _is_collective(event: Event) -> bool:
    return event.name.lower().startswith(_COLLECTIVES)


def _outermost(events: Sequence[Event]) -> list[Event]:
    """Operations of torch that are not part of another one."""
    found: list[Event] = []
    ends: dict[object, float] = {}
    for event in sorted(
        (event for event in events if event.kind == "cpu_op"), key=lambda event: (event.begin, -event.end)
    ):
        if event.begin >= ends.get(event.thread, 0.0):
            found.append(event)
            ends[event.thread] = event.end
    return found


def _operators(events: Sequence[Event], steps: int) -> tuple[Operator, ...]:
    calls: dict[str, list[float]] = defaultdict(list)
    for event in events:
        calls[event.name].append(event.end - event.begin)
    found = [Operator(name, len(each) / steps, sum(each) / steps) for name, each in calls.items()]
    return tuple(sorted(found, key=lambda operator: -operator.seconds)[:30])
