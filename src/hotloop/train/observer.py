"""What happens in a training, told to whoever wants to know: the terminal, the run's files, TensorBoard."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from hotloop.core.job import Job
from hotloop.core.run import Result, Run
from hotloop.train.progress import Progress
from hotloop.train.resolve import Choice


@dataclass(frozen=True)
class Started:
    """The loop is about to begin.

    Attributes:
        job: as resolved.
        steps: of the whole run.
        samples: of the training data.
        parameters: trainable ones of the model.
        resumed_from: the checkpoint, if it continues.
        changed: settings that differ from the checkpoint's, a line each.
        choices: what "auto" in the job stands for, and why.
    """

    run: Run
    job: Job
    steps: int
    samples: int
    parameters: int
    resumed_from: str
    changed: list[str]
    progress: Progress
    choices: Sequence[Choice] = ()


@dataclass(frozen=True)
class Logged:
    """Some steps were done.

    Attributes:
        loss: mean over the steps that have arrived since the last one.
        samples_per_second, data_wait_share: over the steps since the last one.
        tokens_per_second: 0 if samples are not made of tokens.
        flops_per_second: the model's own arithmetic, recomputation not counted; 0 if it is not known.
        mfu: share of the device's measured matrix rate that this is; 0 if it is not known.
        memory_bytes: allocated on the GPU at the most; on a CPU, resident at the most.
        scale: what the loss is multiplied by (fp16), otherwise 1.
    """

    progress: Progress
    loss: float
    learning_rate: float
    samples_per_second: float
    data_wait_share: float
    memory_bytes: int
    scale: float
    tokens_per_second: float = 0.0
    flops_per_second: float = 0.0
    mfu: float = 0.0


@dataclass(frozen=True)
class Validated:
    """An epoch ended: its measures are in `progress.current`, the means of its validation in `metrics`."""

    progress: Progress
    metrics: dict[str, float]
    seconds: float


@dataclass(frozen=True)
class Saved:
    """A checkpoint was written.

    Attributes:
        progress: where the training stood; it may have gone on meanwhile.
        seconds: until it was whole.
        stalled_seconds: for which the training has waited.
    """

    progress: Progress
    path: str
    seconds: float
    stalled_seconds: float


@dataclass(frozen=True)
class Copied:
    """A checkpoint is in object storage, too."""

    place: str
    seconds: float


@dataclass(frozen=True)
class Warned:
    """Something that does not stop the run."""

    text: str


@dataclass(frozen=True)
class Ended:
    """The run is over, one way or another."""

    run: Run
    result: Result


Event = Started | Logged | Validated | Saved | Copied | Warned | Ended


class Observer:
    """Is told events; does nothing with them."""

    def on(self, event: Event) -> None:
        """Called in the training process, in order: be quick."""

    def warn(self, text: str) -> None:
        """Tell a line that does not stop the run."""
        self.on(Warned(text))

    def close(self) -> None:
        """Called once, whether the run ended well or not."""


class Observers(Observer):
    """Tells several.

    Args:
        waiting: entered meanwhile: the disk that one of them writes to may take long.
    """

    def __init__(
        self, observers: Sequence[Observer], waiting: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        self._observers, self._waiting = observers, waiting

    def on(self, event: Event) -> None:
        with self._waiting():
            for observer in self._observers:
                observer.on(event)

    def close(self) -> None:
        for observer in self._observers:
            observer.close()
