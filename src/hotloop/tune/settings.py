"""Tuned settings as a TOML file, with the evidence that they are faster."""

import json
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import TypeAdapter, ValidationError

from hotloop.core.errors import InputError
from hotloop.core.files import read_toml
from hotloop.core.job import Job
from hotloop.core.tuning import ProcessSettings, Tuning
from hotloop.tune.job_trials import overrides
from hotloop.tune.script_trials import plan_of

_PROCESS = TypeAdapter(ProcessSettings)


def job_settings(tuning: Tuning, job: Job) -> str:
    """For `hotloop train JOB --settings FILE`: a job's keys, without those that are as they were."""
    changed = {name: value for name, value in overrides(job, tuning.best).items() if _now(job, name) != value}
    nested: dict[str, Any] = {}
    for name, value in changed.items():
        *tables, last = name.split(".")
        section = nested
        for table in tables:
            section = section.setdefault(table, {})
        section[last] = value
    process = dict(ProcessSettings.of(tuning.best).changed)
    return tomli_w.dumps({"job": nested, "process": process, "evidence": _evidence(tuning)})


def script_settings(tuning: Tuning) -> str:
    """For `hotloop run --settings FILE -- COMMAND`."""
    plan = plan_of(tuning.best)
    numbers = {"workers": plan.workers, "prefetch_factor": plan.prefetch_factor, "threads": plan.threads}
    chosen = {name: value for name, value in numbers.items() if value}
    return tomli_w.dumps({"run": {"accelerations": list(plan.names), **chosen}, "evidence": _evidence(tuning)})


def _now(job: Job, name: str) -> object:
    found: Any = job
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _evidence(tuning: Tuning) -> dict[str, Any]:
    return {
        "target": list(tuning.target),
        "times_as_fast": round(tuning.ratio, 4),
        "error": round(tuning.error, 4),
        "certain": tuning.certain,
        "trials": [
            {
                "settings": dict(one.settings),
                "state": one.state,
                "sample_seconds": one.sample_seconds,
                "error": one.error,
            }
            for one in tuning.trials
        ],
    }


def read_job_settings(file: Path) -> tuple[list[str], ProcessSettings]:
    """What `--set` would say of a file that `hotloop tune` has written, and what is the process's.

    Raises:
        InputError: it cannot be read, or is something else.
    """
    fix = f"hotloop tune job.toml --out {file}"
    content = read_toml(file, fix)
    if not isinstance(content.get("job"), dict):
        raise InputError(f"{file} has no table [job]", "it is no file of settings for a job", fix)
    process = content.get("process", {})
    if not isinstance(process, dict):
        raise InputError(f"{file}: process = {process!r}", "it is a table of settings", fix)
    keys = [f"{name}={_toml(value)}" for name, value in _flat(content["job"])]
    return keys, _process(process, file, fix)


def _process(table: dict[str, Any], file: Path, fix: str) -> ProcessSettings:
    for name in table:
        if name not in ProcessSettings.names():
            known = f"there are {', '.join(ProcessSettings.names())}"
            raise InputError(f"{file}: process.{name} is no setting", known, fix)
    try:
        return _PROCESS.validate_json(json.dumps(table, default=str), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        what = ".".join(["process", *map(str, first["loc"])])
        raise InputError(f"{file}: {what} = {first['input']!r}", first["msg"], fix) from None


def _flat(table: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in table.items():
        found += _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)]
    return found


def _toml(value: Any) -> str:
    return tomli_w.dumps({"value": value}).partition(" = ")[2].strip()
