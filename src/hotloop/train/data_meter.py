"""Which share of the speed with data on the device a training reaches, and what holds it up."""

import time
from dataclasses import dataclass, replace
from statistics import median

import torch

from hotloop.core.job import ImagesTask, Job
from hotloop.core.units import count
from hotloop.data import crop_decoder
from hotloop.data.object_store import is_remote
from hotloop.data.stages import Stages
from hotloop.train.hardware_decoder import nvjpeg_library
from hotloop.train.progress import Span

_EVERY = 16
"""Steps, one of which is timed: events cost the host some time, and the smallest steps take 80 us."""
_KEPT = 64
_ENOUGH = 0.97
_SETTLED_STEPS = 32
"""After which nothing is compiled, captured or searched any more, as a rule."""


class StepTimer:
    """Times steps whose data is there: on a GPU by events, on a CPU by the clock."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        self._parts: list[_Part] = []
        self._under_way: list[tuple[list[_Part], int]] = []
        self._started = self._seconds = 0.0
        self._seconds_per_sample: list[float] = []

    @staticmethod
    def is_due(step: int) -> bool:
        """Whether this step is one to time."""
        return step % _EVERY == _EVERY - 1

    def start(self, arriving: torch.cuda.Stream | None = None) -> None:
        """A batch of the step begins.

        Args:
            arriving: the stream on which it arrives, if the current one does not wait for it yet.
        """
        if self._gpu:
            streams = [torch.cuda.current_stream(), *([arriving] if arriving else [])]
            self._parts.append(_Part([stream.record_event(_event()) for stream in streams], _event()))
        else:
            self._started = time.perf_counter()

    def stop(self) -> None:
        """It is launched."""
        if self._gpu:
            self._parts[-1].end.record()
        else:
            self._seconds += time.perf_counter() - self._started

    def end(self, samples: int) -> None:
        """The step was of so many samples."""
        if self._gpu:
            self._under_way.append((self._parts, samples))
            self._parts = []
        else:
            self._seconds_per_sample.append(self._seconds / samples)
            self._seconds = 0.0

    @property
    def seconds_per_sample(self) -> float:
        """The median of the steps that have ended; 0 while there is none."""
        while self._under_way and self._under_way[0][0][-1].end.query():  # type: ignore[no-untyped-call]
            parts, samples = self._under_way.pop(0)
            milliseconds = sum(part.milliseconds for part in parts)
            self._seconds_per_sample.append(milliseconds / 1000 / samples)
        del self._seconds_per_sample[:-_KEPT]
        return median(self._seconds_per_sample) if self._seconds_per_sample else 0.0


@dataclass(frozen=True)
class _Part:
    """A batch of a step on a GPU: it begins when the last of `begins` has come."""

    begins: list[torch.cuda.Event]
    end: torch.cuda.Event

    @property
    def milliseconds(self) -> float:
        return min(float(begin.elapsed_time(self.end)) for begin in self.begins)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class DataSpeed:
    """How well a training is fed.

    Attributes:
        share: of the speed that it would have with its data on the device, 0 to 1; 0 if that is not known.
        slow: what holds it up: reading, decoding, engines, copying or host; empty if nothing does.
        advice: that in words, and what would help.
    """

    share: float = 0.0
    slow: str = ""
    advice: str = ""


class DataMeter:
    """Adds up what a training and the way of its data take, once it has settled."""

    def __init__(self, device: torch.device) -> None:
        self.timer = StepTimer(device)
        self._device = device
        self._span = Span()
        self._stages = Stages()
        self._before = Stages()
        self._steps = 0

    def add(self, span: Span, steps: int, stages: Stages) -> Span:
        """Take in what went by since the last call.

        Args:
            steps: in it.
            stages: of the training's data so far.

        Returns:
            the span with the time in which the device had no data, where that is known better than by the host's wait.
        """
        settled = self._steps >= _SETTLED_STEPS
        self._steps += steps
        since, self._before = stages.minus(self._before), stages
        if settled:
            self._span = self._span.plus(span)
            self._stages = self._stages.plus(since)
        if self._device.type != "cuda" or not stages.working:
            return span
        each = self.timer.seconds_per_sample
        # Before, compilation counts as waiting for nothing; and the host waits for the device as well as for data.
        idle = span.seconds - span.samples * each if settled and each else since.late
        return replace(span, wait_seconds=min(span.seconds, max(0.0, idle)))

    def speed(self, job: Job) -> DataSpeed:
        """How well it was fed."""
        each, span = self.timer.seconds_per_sample, self._span
        if not each or not span.samples:
            return DataSpeed()
        share = min(1.0, span.samples * each / span.seconds)
        if share >= _ENOUGH:
            return DataSpeed(share)
        slow = _slowest(self._stages, (1 - share) * span.seconds)
        return DataSpeed(share, slow, _advice(slow, self._stages, job))


def _slowest(stages: Stages, lost_seconds: float) -> str:
    if stages.late + stages.behind < lost_seconds / 2:
        return "host"
    if stages.late > stages.behind:
        return "reading" if stages.reading > 0.5 * stages.working else "decoding"
    return "engines" if stages.decoding > stages.copying else "copying"


def _advice(slow: str, stages: Stages, job: Job) -> str:
    pack = "hotloop data pack"
    if slow == "host":
        drawn = " (RandAugment, MixUp, ...)" if job.task.name == "images" else ""
        return (
            f"the training process itself holds it up: what it does between steps{drawn}, or other programs on its "
            "processors"
        )
    if slow == "copying":
        return "copies to the device hold it up: smaller samples would help"
    if slow == "engines":
        return f"the card's JPEG engines hold it up: more processors would help, or smaller images ({pack} --side)"
    number = int(job.data.workers)
    workers = count(number, "worker") if number else "the training process, which has no workers,"
    share = f"{100 * stages.reading / stages.working:.0f} % of the time" if stages.working else "none of the time"
    if slow == "reading" and is_remote(job.data.train):
        kept = "more of it kept on the local disk would help (data.cache_gib, and a disk with the room)"
        return f"{workers} read from object storage for {share}: {kept}, or large files read in order ({pack})"
    if slow == "reading":
        return f"{workers} read files for {share}: a faster disk would help, or large files read in order ({pack})"
    more = "more processors would help" if number else "workers would help (data.workers)"
    if not isinstance(job.task, ImagesTask):
        return f"{workers} cannot prepare samples as fast: {more}"
    extra = ""
    if job.device == "cuda" and job.data.decode == "cpu" and nvjpeg_library() is None:
        extra = ", or the card's engines (pip install 'hotloop[gpu-decode]')"
    elif not crop_decoder.is_installed():
        extra = ", or decoding crops alone (pip install 'hotloop[cpu-decode]')"
    return f"{workers} cannot decode as fast (reading is {share}): {more}, or smaller images ({pack} --side){extra}"
