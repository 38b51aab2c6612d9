"""Trials of a job: the loop that `hotloop train` runs, in a process of its own, ended after some steps."""

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from hotloop.core.job import Job
from hotloop.core.job_file import parse_job
from hotloop.core.tuning import Settings, Value
from hotloop.tune.running import Chunk, Running, mean_of

_FOREVER = 1_000_000
_TOLD_SECONDS = 0.25
_CHUNKS, _MEASURED_SECONDS = 40, 300.0
"""The first half of the chunks compile and warm up."""


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
        raw = job_with(self._job, settings).model_dump(mode="json", exclude_none=True)
        folder = mkdtemp(prefix="hotloop-")
        raw["run"] = {"root": folder}
        raw["train"]["epochs"] = _FOREVER
        raw["checkpoint"]["every"] = f"{_FOREVER} epochs"
        # A GPU is not waited for at each step, as it would be for its loss; on a CPU ten steps may take long.
        raw["log"] = {"every": 1 if self._job.device == "cpu" else "auto", "tensorboard": False}
        raw["data"].pop("val", None)
        threads = {"OMP_NUM_THREADS": str(settings["threads"])} if settings.get("threads") else {}
        inside = {**self._environment, "GOMP_SPINCOUNT": "10000", **threads}
        # -P: a file of the user's that is named like a library does not stand for it.
        command = [sys.executable, "-P", "-m", "hotloop.tune.job_trials", folder]
        return Running(command, inside, Path(folder), json.dumps(raw).encode())


def step_seconds(job: Job, environment: Mapping[str, str]) -> float:
    """How long a step of the job takes as it stands: the mean of some, timed like a trial, in at most five minutes.

    Raises:
        Failed: it does not train.
    """
    chunks: list[Chunk] = []
    with JobTrials(job, environment)({}) as running:
        for chunk in running.chunks(time.monotonic() + _MEASURED_SECONDS):
            chunks.append(chunk)
            if len(chunks) == _CHUNKS:
                break
    return mean_of(chunks[-_CHUNKS // 2 :])[0] * job.data.batch_size * job.train.accumulate


def _train(folder: Path) -> None:
    """What a trial's process does: train the job that comes in, and tell how fast it is until asked to end."""
    from hotloop.core.machine import read_machine
    from hotloop.train.memory import memory_report, memory_trouble
    from hotloop.train.observer import Event, Logged, Observer
    from hotloop.train.progress import Span
    from hotloop.train.training import train_job

    class Teller(Observer):
        def __init__(self) -> None:
            self._told = Span()
            self._losses: list[tuple[int, float]] = []
            self._steps = 0

        def on(self, event: Event) -> None:
            if not isinstance(event, Logged):
                return
            whole = event.progress.whole
            self._losses.append((whole.steps - self._steps, event.loss))
            self._steps = whole.steps
            if whole.seconds - self._told.seconds >= _TOLD_SECONDS:
                samples = whole.samples - self._told.samples
                told = {
                    "seconds": (whole.seconds - self._told.seconds) / samples,
                    "samples": samples,
                    "losses": self._losses,
                    "trouble": memory_trouble(memory_report()),
                }
                file.write(json.dumps(told) + "\n")
                file.flush()
                self._told, self._losses = whole, []
            if (folder / "stop").exists():
                os._exit(0)

    job = parse_job(json.load(sys.stdin), "the trial's job")
    sys.path.append(str(Path.cwd()))
    with (folder / f"told-{os.getpid()}.jsonl").open("a") as file:
        train_job(job, read_machine(), Teller())


if __name__ == "__main__":
    _train(Path(sys.argv[1]))
