"""What is asked of an engine: a job with everything that it leaves open settled."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from hotloop.core.errors import InputError
from hotloop.core.job import Job
from hotloop.core.units import count
from hotloop.launch.network import network_variables
from hotloop.launch.secrets import check_secrets

FOLDER = ".launch"
"""In the folder of the runs: what launches have left."""


@dataclass(frozen=True)
class Request:
    """A training to be started.

    Attributes:
        name: of this launch; no other one in the same folder has it.
        job: as the training reads it: with a run.dir, so that each start continues the same run.
        nodes: machines.
        gpus: of each.
        directory: where paths in the job begin.
        folder: what the launch leaves: script, log, how it ended.
        run_dir: of the run.
        environment: variables that are set for it, besides those that it finds.
        named: whether the run's directory has its name from the job, and not from the time.
    """

    name: str
    job: Job
    nodes: int
    gpus: int
    directory: Path
    folder: Path
    run_dir: Path
    environment: Mapping[str, str]
    named: bool = True

    def numbered(self, number: int) -> "Request":
        """The same by another name, as another launch has this one; a run that is named by the time is another, too."""
        folder = self.folder.with_name(f"{self.folder.name}-{number}")
        if self.named:
            return replace(self, folder=folder, name=folder.name)
        run_dir = self.run_dir.with_name(folder.name)
        job = self.job.model_copy(update={"run": self.job.run.model_copy(update={"dir": str(run_dir)})})
        return replace(self, folder=folder, name=folder.name, run_dir=run_dir, job=job)

    @property
    def job_file(self) -> Path:
        """The job as the training reads it; what is changed in the user's file after this changes nothing."""
        return self.folder / "job.toml"


def make_request(
    job: Job, nodes: int | None, gpus: int | None, gpus_of: Callable[[], int], directory: Path, now: datetime,
    suffix: str = "",
) -> Request:  # fmt: skip
    """Settle what a job leaves open.

    Args:
        nodes, gpus: in place of those of the job, where they are given.
        gpus_of: a machine of the engine, asked where neither says it.
        directory: where paths in the job begin: the current one.
        suffix: to the name of the run's directory, for one of several of a sweep.

    Raises:
        InputError: what is asked for contradicts itself, or holds a secret.
    """
    check_secrets(job)
    check_environment(job.launch.environment)
    nodes = nodes or job.launch.nodes
    asked = job.launch.gpus if gpus is None else gpus
    gpus = asked if isinstance(asked, int) else _wanted_gpus(job, gpus_of)
    processes = job.ranks.processes if job.ranks.processes != "auto" else max(1, gpus)
    if job.device != "cpu" and gpus and processes > gpus:
        raise InputError(
            f"ranks.processes = {processes} is more than the {count(gpus, 'GPU')} of a machine",
            "each process trains on one of its own",
            f"--gpus {processes}, or --set ranks.processes={gpus}",
        )
    if job.parallel == "none" and nodes > 1:
        raise InputError(
            f'parallel = "none" does not go with {nodes} machines', "one process trains alone", "--set parallel=auto"
        )
    if (all_processes := processes * nodes) > job.data.batch_size:
        raise InputError(
            f"data.batch_size = {job.data.batch_size} is less than the {all_processes} processes that share a batch",
            f"{count(nodes, 'machine')} with {processes} each",
            f"--set data.batch_size={all_processes}",
        )
    root = Path(job.run.root)
    by_time = f"{root / job.name}-{now:%Y%m%d-%H%M%S}{suffix}"
    run_dir = (directory / (f"{Path(job.run.dir)}{suffix}" if job.run.dir else by_time)).absolute()
    folder = run_dir.parent / FOLDER / run_dir.name
    settled = job.model_copy(
        update={
            "run": job.run.model_copy(update={"dir": str(run_dir)}),
            "ranks": job.ranks.model_copy(update={"processes": processes}),
            "launch": job.launch.model_copy(update={"nodes": nodes, "gpus": gpus}),
        }
    )
    chosen = {one.name: one.value for one in network_variables(settled.launch)}
    environment = {**chosen, **job.launch.environment}
    named = job.run.dir is not None
    return Request(folder.name, settled, nodes, gpus, directory.absolute(), folder, run_dir, environment, named)


def _wanted_gpus(job: Job, gpus_of: Callable[[], int]) -> int:
    if job.device == "cpu":
        return 0
    return job.ranks.processes if job.ranks.processes != "auto" else gpus_of()


_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def check_environment(environment: Mapping[str, str]) -> None:
    """Raise InputError for what no shell takes as a variable."""
    for name, value in environment.items():
        if name.lower().startswith(("hl_", "hotloop_")):
            raise InputError(
                f"launch.environment.{name} is hotloop's own", "its scripts use names like it", "rename it"
            )
        if not _VARIABLE.fullmatch(name):
            raise InputError(
                f"launch.environment.{name!r} is no variable of a shell",
                "letters, digits and _; no digit first",
                "rename it",
            )
        if "\0" in value:
            raise InputError(f"launch.environment.{name} holds a NUL", "no variable can", "remove it")
