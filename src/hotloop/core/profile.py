"""What is concluded about a script: where a step's time goes, what it costs, and what would help."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hotloop.core.errors import InputError

KINDS = ("input", "copy", "launch", "sync", "compute", "communication", "other")
"""Where the time of a step can go."""
_CERTAIN = 2.0
"""Standard errors from which on steps with a part left out are told apart from whole ones."""


@dataclass(frozen=True)
class Operator:
    """An operation of the trace, all its calls together.

    Attributes:
        calls: a step.
        seconds: a step; on the GPU where there is one.
    """

    name: str
    calls: float
    seconds: float


@dataclass(frozen=True)
class StepSeconds:
    """Of steps that are like others.

    Attributes:
        mean: what speed follows from: where workers give their batches by turns, most steps are shorter.
        error: of the mean, by the steps' standard deviation.
    """

    median: float
    p10: float
    p90: float
    mean: float
    error: float


@dataclass(frozen=True)
class Ablation:
    """Steps with a part left out.

    Attributes:
        step_seconds: mean.
        gain: share of the whole step's time that was saved.
        error: standard error of that gain, by the steps' standard deviation under both conditions.
    """

    name: str
    step_seconds: float
    gain: float
    error: float = 0.0

    @property
    def is_certain(self) -> bool:
        """Whether it has saved more than chance may: steps that something else has disturbed."""
        return self.gain > _CERTAIN * self.error


@dataclass(frozen=True)
class Finding:
    """Something that costs time.

    Attributes:
        id: its name, for scripts.
        evidence: what was measured.
        gain_at_most: share of the step's time that mending it can save: measured where a part was left out, else by
            Amdahl's law.
        fix: what to change.
        outside: the acceleration of `hotloop run` that does as much without a change of the script; empty: none does.
        location: "FILE:LINE" of the script, if one is known.
    """

    id: str
    title: str
    evidence: str
    gain_at_most: float
    fix: str
    location: str = ""
    outside: str = ""


@dataclass(frozen=True)
class RankProfile:
    """One process of several.

    Attributes:
        waiting: share of its step in which it waited for slower ranks; part of its communication.
    """

    rank: int
    step_seconds: StepSeconds
    shares: Mapping[str, float]
    waiting: float = 0.0


@dataclass(frozen=True)
class Profile:
    """Where the time of a training goes.

    Attributes:
        command: that was profiled.
        device: "cuda" or "cpu".
        steps_measured: that are like others.
        shares: of a step's time, by kind; their sum is 1.
        verdict: the kind that holds the training up.
        sentence: the same in words.
        overhead_ratio: by how much watching lengthened a step; noise may make it negative.
        notes: what could not be measured and why, or was disturbed.
        memory: bytes and counts of the GPU's allocator.
        files: written besides, by kind.
    """

    command: tuple[str, ...]
    device: str
    device_name: str
    steps_measured: int
    step_seconds: StepSeconds
    shares: Mapping[str, float]
    verdict: str
    sentence: str
    ablations: tuple[Ablation, ...]
    overhead_ratio: float
    findings: tuple[Finding, ...]
    ranks: tuple[RankProfile, ...] = ()
    operators: tuple[Operator, ...] = ()
    notes: tuple[str, ...] = ()
    memory: Mapping[str, float] = field(default_factory=dict)
    gpu_idle: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, file: Path) -> "Profile":
        """Read what `hotloop profile --json` has printed.

        Raises:
            InputError: the file cannot be read, or is something else.
        """
        from pydantic import TypeAdapter, ValidationError

        fix = f"hotloop profile --json -- python train.py > {file.name}"
        try:
            return TypeAdapter(cls).validate_json(file.read_bytes())
        except OSError as error:
            raise InputError(f"cannot read {file}", error.strerror or str(error), fix) from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise InputError(f"{file} is no profile", f"{where}: {first['msg']}".removeprefix(": "), fix) from error
