"""Where a training stands, and what it has measured of itself so far."""

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
        sums = {name: getattr(self, name) + getattr(other, name) for name in asdict(self)}
        return Span(**sums)


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
