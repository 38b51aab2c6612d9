"""Where a training stands, and what it has measured of itself so far."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Span:
    """Measures over a span of training; validation and saving are not in it.

    Attributes:
        samples: trained on.
        seconds: of training.
        wait_seconds: of those, waiting for data.
        loss_sum: over steps.
        steps: in it.
    """

    samples: int = 0
    seconds: float = 0.0
    wait_seconds: float = 0.0
    loss_sum: float = 0.0
    steps: int = 0

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def data_wait_share(self) -> float:
        return self.wait_seconds / self.seconds if self.seconds else 0.0

    @property
    def mean_loss(self) -> float:
        return self.loss_sum / self.steps if self.steps else float("nan")

    def plus(self, other: "Span") -> "Span":
        """Both spans as one."""
        return Span(
            self.samples + other.samples,
            self.seconds + other.seconds,
            self.wait_seconds + other.wait_seconds,
            self.loss_sum + other.loss_sum,
            self.steps + other.steps,
        )


class Meter:
    """Measures what goes by between two looks at it, at little cost a step."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._samples = 0
        self._wait_seconds = 0.0
        self._started = clock()

    def start(self) -> None:
        """Let the time that has passed since the last look count for nothing."""
        self._started = self._clock()

    def add(self, samples: int) -> None:
        """Count samples trained on."""
        self._samples += samples

    def waited(self, seconds: float) -> None:
        """Count time spent waiting for data."""
        self._wait_seconds += seconds

    def take(self) -> Span:
        """All since the last look or start."""
        now = self._clock()
        span = Span(self._samples, now - self._started, self._wait_seconds)
        self._samples, self._wait_seconds, self._started = 0, 0.0, now
        return span


@dataclass(frozen=True)
class Progress:
    """A position between two steps.

    Attributes:
        epoch: the pass it is in, from 0.
        batch: batches of that pass that are done.
        step: steps that are done.
        whole: measures since the start of the run.
        current: measures since the start of the epoch.
        metrics: of the last validation, and "train_loss", the mean over the steps of that epoch.
        damages: damaged samples met, by name; their reason.
    """

    epoch: int = 0
    batch: int = 0
    step: int = 0
    whole: Span = Span()
    current: Span = Span()
    metrics: dict[str, float] = field(default_factory=dict)
    damages: dict[str, str] = field(default_factory=dict)

    @property
    def position(self) -> tuple[int, int, int]:
        """Epoch, batch and step: what comes next depends on these alone."""
        return self.epoch, self.batch, self.step

    def measured(self, span: Span) -> "Progress":
        """The same position with a measured span added."""
        return replace(self, whole=self.whole.plus(span), current=self.current.plus(span))

    def to_state(self) -> dict[str, Any]:
        """As plain data, for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Progress":
        """From `to_state()`."""
        return cls(**{**state, "whole": Span(**state["whole"]), "current": Span(**state["current"])})
