"""Trials of a job: the loop that `hotloop train` runs, in a process of its own, ended after some steps."""

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from hotloop.core.job import Job, parse_job
from hotloop.core.tuning import Settings, Value
from hotloop.tune.running import Running

_FOREVER = 1_000_000
_TOLD_SECONDS = 0.25


def job_with(job: Job, settings: Settings) -> Job:
    """The job with these settings laid over it; the samples of a step stay as they are.

    Raises:
        InputError: it cannot have them.
    """
    raw: dict[str, Any] = job.model_dump(mode="json", exclude_none=True)
    for name, value in overrides(job, settings).items():
        *tables, last = name.split(".")
        section = raw
        for table in tables:
            section = section[table]
        section[last] = value
    return parse_job(raw, "the job with tuned settings")


def overrides(job: Job, settings: Settings) -> dict[str, Value]:
    """A job's own keys for these settings."""
    found = {name: value for name, value in settings.items() if name != "threads"}
    if "train.accumulate" in found:
        found["data.batch_size"] = job.data.batch_size * job.train.accumulate // int(found["train.accumulate"])
    return found


class JobTrials:
    """Starts a job's training again and again, each in a folder that is thrown away."""

    def __init__(self, job: Job, environment: Mapping[str, str]) -> None:
        self._job = job
        self._environment = environment

    def __call__(self, settings: Settings) -> Running:
        folder = TemporaryDirectory(prefix="hotloop-")
        raw = job_with(self._job, settings).model_dump(mode="json", exclude_none=True)
        raw["run"] = {"root": folder.name}
        raw["train"]["epochs"] = _FOREVER
        raw["checkpoint"]["every"] = f"{_FOREVER} epochs"
        raw["log"] = {"every": 1, "tensorboard": False}
        raw["data"].pop("val", None)
        threads = {"OMP_NUM_THREADS": str(settings["threads"])} if "threads" in settings else {}
        inside = {**self._environment, "GOMP_SPINCOUNT": "10000", **threads}
        command = [sys.executable, "-m", "hotloop.tune.job_trials", folder.name]
        return Running(command, inside, folder, json.dumps(raw).encode())


def _train(folder: Path) -> None:
    """What a trial's process does: train the job that comes in, and tell how fast it is until asked to end."""
    from hotloop.core.machine import read_machine
    from hotloop.train.memory import memory_report, memory_trouble
    from hotloop.train.observer import Event, Logged, Observer
    from hotloop.train.training import train_job

    class Teller(Observer):
        def __init__(self) -> None:
            self._began = time.monotonic()
            self._steps: list[Logged] = []

        def on(self, event: Event) -> None:
            if not isinstance(event, Logged):
                return
            self._steps.append(event)
            if time.monotonic() - self._began >= _TOLD_SECONDS:
                told = {
                    "seconds": fmean(1 / step.samples_per_second for step in self._steps),
                    "steps": len(self._steps),
                    "loss": fmean(step.loss for step in self._steps),
                    "trouble": memory_trouble(memory_report()),
                }
                file.write(json.dumps(told) + "\n")
                file.flush()
                self._began, self._steps = time.monotonic(), []
                if (folder / "stop").exists():
                    os._exit(0)

    job = parse_job(json.load(sys.stdin), "the trial's job")
    sys.path.append(str(Path.cwd()))
    with (folder / f"told-{os.getpid()}.jsonl").open("a") as file:
        train_job(job, read_machine(), Teller())


if __name__ == "__main__":
    _train(Path(sys.argv[1]))
