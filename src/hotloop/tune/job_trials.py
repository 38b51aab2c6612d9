"""Trials of a job: the loop that `hotloop train` runs, in a process of its own, ended after some steps."""

import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from hotloop.core.environment import for_training
from hotloop.core.job import Job
from hotloop.core.job_file import parse_job
from hotloop.core.tuning import ProcessSettings, Settings, Value
from hotloop.tune.children import OUTPUT, removed_if_it_fails
from hotloop.tune.running import Chunk, Failed, Running, mean_of
from hotloop.tune.zygote import Zygote

_FOREVER = 1_000_000
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
    found = {name: value for name, value in settings.items() if name not in ProcessSettings.names()}
    if "train.accumulate" in found:
        found["data.batch_size"] = job.data.batch_size * job.train.accumulate // int(found["train.accumulate"])
    return found


class JobTrials:
    """Starts a job's training again and again, each in a folder that is thrown away; a context manager.

    Args:
        environment: of trials; looked up for each.
    """

    def __init__(self, job: Job, environment: Mapping[str, str]) -> None:
        self._job = job
        self._environment = environment
        # By the driver's own library; CUDA's, once asked whether there are GPUs, does not work in forks.
        # https://docs.pytorch.org/docs/stable/notes/cuda.html
        asked = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        self._zygote = Zygote("hotloop.tune.trial", {**for_training(environment), **asked})

    def __enter__(self) -> "JobTrials":
        return self

    def __exit__(self, *_: object) -> None:
        self._zygote.close()

    def __call__(self, settings: Settings) -> Running:
        raw = job_with(self._job, settings).model_dump(mode="json", exclude_none=True)
        folder = Path(mkdtemp(prefix="hotloop-"))
        raw["run"] = {"root": str(folder)}
        raw["train"]["epochs"] = _FOREVER
        raw["checkpoint"]["every"] = f"{_FOREVER} epochs"
        # A GPU is not waited for at each step, as it would be for its loss; on a CPU ten steps may take long.
        every = 1 if self._job.device == "cpu" else "auto"
        raw["log"] = {"every": every, "tensorboard": False, "report": False}
        raw["data"].pop("val", None)
        process = ProcessSettings.of(settings)
        environment = for_training({**self._environment, **process.environment})
        with removed_if_it_fails(folder):
            child = self._zygote.fork("train", (raw, folder, process), environment, folder / OUTPUT)
        return Running(child, folder)


def step_seconds(job: Job, environment: Mapping[str, str]) -> float:
    """How long a step of the job takes as it stands: the mean of some, timed like a trial, in at most five minutes.

    Raises:
        Failed: it does not train.
    """
    chunks: list[Chunk] = []
    try:
        with JobTrials(job, environment) as trials, trials({}) as running:
            for chunk in running.chunks(time.monotonic() + _MEASURED_SECONDS):
                chunks.append(chunk)
                if len(chunks) == _CHUNKS:
                    break
    except OSError as error:  # nothing could be started
        raise Failed(str(error)) from None
    return mean_of(chunks[-_CHUNKS // 2 :])[0] * job.data.batch_size * job.train.accumulate
