"""What `hotloop tune` has tried, and found."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from pydantic import NonNegativeInt

from hotloop.core.environment import ALLOCATOR

Value = bool | int | float | str
Settings = Mapping[str, Value]

DONE, WORSE, FAILED = "done", "worse", "failed"
"""States of a trial: measured as long as was asked for; ended early, as it was certain to lose; it has broken."""


@dataclass(frozen=True)
class ProcessSettings:
    """Of the process that trains, for which a job has no keys.

    Attributes:
        threads: of loops on the CPU; 0: as they are.
        numa: it stays on the processors of one memory node: its GPU's, or the largest.
        expandable_segments: what the GPU's allocator holds may grow; else new pieces are asked of the driver.
    """

    threads: NonNegativeInt = 0
    numa: bool = False
    expandable_segments: bool = True

    @classmethod
    def of(cls, settings: Settings) -> "ProcessSettings":
        """Those among others."""
        return cls(**{name: settings[name] for name in cls.names() if name in settings})  # type: ignore[arg-type]

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in fields(cls))

    @property
    def changed(self) -> Settings:
        """Those that are not as they are without."""
        return {name: value for name, value in asdict(self).items() if value != getattr(ProcessSettings(), name)}

    @property
    def environment(self) -> dict[str, str]:
        """Variables that are read when torch is imported, or the GPU is first used."""
        threads = {"OMP_NUM_THREADS": str(self.threads)} if self.threads else {}
        return {**threads, **({} if self.expandable_segments else {ALLOCATOR: "expandable_segments:False"})}


@dataclass(frozen=True)
class Trial:
    """One start of the training.

    Attributes:
        settings: those that differ from one trial to another.
        sample_seconds: seconds a sample, or a step where samples are not known; mean. 0 if it failed.
        error: standard error of that.
        loss: of its last steps; None if it is not known.
        took_seconds: the trial as a whole, its start included.
        why: it failed.
    """

    settings: Settings
    state: str
    sample_seconds: float = 0.0
    error: float = 0.0
    loss: float | None = None
    took_seconds: float = 0.0
    why: str = ""


@dataclass(frozen=True)
class Tuning:
    """What came of a search.

    Attributes:
        target: the job file, or the command.
        best: the settings to use.
        before, after: seconds a sample with the settings as they were, and with the best; means over their trials.
        error: standard error of the ratio of the two.
        certain: whether the best is told apart from the second best.
        size: of the whole grid of settings.
        took_seconds: the search as a whole.
        ended: why it ended: "done", "budget" or "interrupted".
    """

    target: tuple[str, ...]
    best: Settings
    before: float
    after: float
    error: float
    certain: bool
    trials: tuple[Trial, ...]
    size: int
    took_seconds: float
    ended: str
    notes: tuple[str, ...] = ()

    @property
    def ratio(self) -> float:
        """How many times faster the best is."""
        return self.before / self.after if self.after else 0.0

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "ratio": self.ratio})
