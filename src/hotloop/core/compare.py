"""Two runs side by side: what was asked differently, what came out differently, and where the curves part."""

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hotloop.core.errors import InputError
from hotloop.core.run import Run

_NOT_SETTINGS = {"run.dir", "run.root", "name"}
_RESULTS = ("status", "epochs", "steps", "samples_per_second", "data_wait_share", "train_seconds", "weights_sha256")


@dataclass(frozen=True)
class Curve:
    """How one curve of two runs relates, over the positions both have.

    Attributes:
        name: which curve.
        shared: positions that both have.
        first_difference: the first where they differ; None if they are equal.
        largest: the largest difference, B minus A.
        largest_at: where that is.
        last: the difference at the last shared position.
        unit: of positions, "step" or "epoch".
    """

    name: str
    shared: int
    first_difference: int | None
    largest: float
    largest_at: int
    last: float
    unit: str

    @property
    def sentence(self) -> str:
        """All of it in one line."""
        if not self.shared:
            return f"{self.name}: no {self.unit} in common"
        if self.first_difference is None:
            return f"{self.name}: equal at all {self.shared} {self.unit}s in common"
        return (
            f"{self.name}: differs from {self.unit} {self.first_difference} on; at most {self.largest:+.4g} at "
            f"{self.unit} {self.largest_at}; {self.last:+.4g} at the last of {self.shared} in common"
        )


@dataclass(frozen=True)
class Comparison:
    """Run B against run A.

    Attributes:
        settings: keys of the resolved jobs whose values differ, with both; None where a run has no such key.
        results: figures of both results; None where a run has none.
        curves: loss by step, validation by epoch.
    """

    a: str
    b: str
    settings: dict[str, tuple[Any, Any]]
    results: dict[str, tuple[Any, Any]]
    curves: list[Curve]

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def compare_runs(a: Run, b: Run) -> Comparison:
    """Compare two runs, whatever their state.

    Raises:
        InputError: a run's job cannot be read.
    """
    jobs = [_settings(run) for run in (a, b)]
    settings = {
        key: (jobs[0].get(key), jobs[1].get(key))
        for key in sorted({*jobs[0], *jobs[1]} - _NOT_SETTINGS)
        if jobs[0].get(key) != jobs[1].get(key)
    }
    outcomes = [_outcome(run) for run in (a, b)]
    names = [*outcomes[0], *(name for name in outcomes[1] if name not in outcomes[0])]
    results = {name: (outcomes[0].get(name), outcomes[1].get(name)) for name in names}
    records = (a.metrics(), b.metrics())
    scores = sorted({key for run in records for record in run for key in record if key.startswith("val_")})
    curves = [_curve("loss", "step", "step", records), *(_curve(name, "epoch", "epoch", records) for name in scores)]
    return Comparison(a.name, b.name, settings, results, curves)


def _settings(run: Run) -> dict[str, Any]:
    try:
        return flat(tomllib.loads(run.job_file.read_text()))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {run.job_file}", str(error), "name another run: hotloop runs") from None


def _outcome(run: Run) -> dict[str, Any]:
    result = run.result()
    if result is None:
        return {"status": run.status()}
    figures = asdict(result)
    return {name: figures[name] for name in _RESULTS} | {f"metrics.{k}": v for k, v in result.metrics.items()}


def flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Tables in tables as one table with dotted keys."""
    keys: dict[str, Any] = {}
    for key, value in nested.items():
        keys |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return keys


def _curve(key: str, event: str, unit: str, records: tuple[list[dict[str, Any]], list[dict[str, Any]]]) -> Curve:
    offset = 1 if unit == "epoch" else 0  # epochs count from 0 in files, from 1 for people
    points = [
        {r[unit] + offset: r[key] for r in run if r["event"] == event and r.get(key) is not None} for run in records
    ]
    shared = sorted(points[0].keys() & points[1].keys())
    differences = {position: points[1][position] - points[0][position] for position in shared}
    different = [position for position in shared if differences[position]]
    largest_at = max(shared, key=lambda position: abs(differences[position]), default=0)
    return Curve(
        name=key,
        shared=len(shared),
        first_difference=different[0] if different else None,
        largest=differences.get(largest_at, 0.0),
        largest_at=largest_at,
        last=differences[shared[-1]] if shared else 0.0,
        unit=unit,
    )
