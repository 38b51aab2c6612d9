"""What `hotloop run` did to a script, and what it brought."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

ON, UNDONE, FAILED, UNFIT = "on", "undone", "failed", "unfit"
"""States of an acceleration: at work; switched off again as it did not help; as it broke; it has nothing to do here."""


@dataclass(frozen=True)
class Acceleration:
    """One acceleration of a run.

    Attributes:
        level: "exact" or "fast".
        state: "on", "undone", "failed" or "unfit".
        gain: share of the step's time that it saved when it was switched on; None if that was not measured.
        error: of that gain, by the steps' standard deviation.
        count: how often it has acted.
        why: what it does, or why it is not on.
    """

    name: str
    level: str
    state: str
    gain: float | None = None
    error: float = 0.0
    count: int = 0
    why: str = ""


@dataclass(frozen=True)
class Speedup:
    """A script's run.

    Attributes:
        device: "cuda" or "cpu"; empty if no training was seen.
        steps: that were seen.
        before_seconds: a step as the script has it, mean; at the pace that the machine had at the end: over
            `after_seconds` it is the product of what each acceleration that stayed on has brought when it came.
        after_seconds: a step with all that stayed on, mean; 0 if the script ended before any of it was timed.
        relative_error: of their ratio, by the steps' standard deviation; 0 if nothing stayed on.
        memory: bytes: "host_peak", and with a GPU "device_peak" and "device_total".
        code: the script's exit code.
    """

    command: tuple[str, ...]
    level: str
    code: int
    device: str = ""
    steps: int = 0
    before_seconds: float = 0.0
    after_seconds: float = 0.0
    relative_error: float = 0.0
    accelerations: tuple[Acceleration, ...] = ()
    notes: tuple[str, ...] = ()
    memory: Mapping[str, int] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """How many times faster; 0 if it was not measured."""
        return self.before_seconds / self.after_seconds if self.after_seconds else 0.0

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "ratio": self.ratio})
