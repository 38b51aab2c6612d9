"""What is asked of Ray, as a file that its driver reads."""

import os
import shlex
import tomllib
from pathlib import Path
from typing import Any

import tomli_w

from hotloop.core.errors import InputError
from hotloop.launch.render import this_python
from hotloop.launch.request import Request

PLAN = "ray.toml"
QUIET = {"RAY_USAGE_STATS_ENABLED": "0"}
"""Before Ray is imported, or started: it would tell its makers how it is used."""

_STOP_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"
"""Seconds that `ray job stop` leaves a job to save in; Ray's own are 3."""
_DRIVER = ["launch", "ray-driver"]
# Ray keeps what the entrypoint writes, and ends all of its processes at once: the log has to stay until the last word.
_LOGGED = '"$@" 2>&1 | (trap "" TERM INT; exec tee -a "$0")'


def make_plan(request: Request) -> dict[str, Any]:
    """In words of Ray: a job's entrypoint and runtime_env, and the configurations of Ray Train.

    Raises:
        InputError: what is asked for has no words there.
    """
    launch, own = request.job.launch, request.job.launch.ray
    _check_words(request)
    address = address_of(own.address)
    number = request.nodes * _processes(request)
    plan = request.folder / PLAN
    own_variables = {**QUIET, "RAY_TRAIN_V2_ENABLED": "1", **({_STOP_WAIT: "120"} if is_web(address) else {})}
    environment = {**own.runtime_env.get("env_vars", {}), **request.environment, **own_variables}
    resources: dict[str, float] = {"CPU": 1 if launch.cpus == "auto" else _share(launch.cpus, request)}
    if request.gpus:
        resources["GPU"] = 1
    if launch.memory_gib != "auto":
        resources["memory"] = launch.memory_gib * 2**30 // _processes(request)
    return {
        "address": address,
        "entrypoint": _entrypoint(request, plan) if is_web(address) else " ".join([*this_python(), *_words(plan)]),
        "runtime_env": {**own.runtime_env, "env_vars": environment},
        "scaling_config": {
            "num_workers": number,
            "use_gpu": request.gpus > 0,
            "resources_per_worker": resources,
            "placement_strategy": "PACK",
        },
        "failure_config": {"max_failures": own.max_failures},
        "run_config": {"name": request.name, "storage_path": str(request.folder / "ray")},
        "training": {
            "job": str(request.job_file),
            "directory": str(request.directory),
            "run_dir": str(request.run_dir),
        },
    }


def render_plan(plan: dict[str, Any]) -> str:
    """As TOML."""
    return tomli_w.dumps(plan)


def read_plan(file: Path) -> dict[str, Any]:
    """As it was written."""
    return tomllib.loads(file.read_text())


def address_of(given: str) -> str:
    """Where Ray is: as the job says, else as Ray's own variables do, else on this machine.

    Raises:
        InputError: it is an address of another kind.
    """
    variables = (os.environ.get("RAY_API_SERVER_ADDRESS", ""), os.environ.get("RAY_ADDRESS", ""))
    address = given or next(filter(None, variables), "auto")
    if "://" in address and not is_web(address):
        raise InputError(
            f"launch.ray.address = {address!r} is no address that a job can be sent to",
            "Ray takes jobs at its dashboard, or from a program at its own port",
            "--set launch.ray.address=http://HEAD:8265, or HEAD:6379",
        )
    return address


def is_web(address: str) -> bool:
    """Whether it is that of a dashboard, which takes jobs."""
    return address.startswith(("http://", "https://"))


def _entrypoint(request: Request, plan: Path) -> str:
    """What Ray runs on the head: its own Python, as that of its workers."""
    log = str(request.folder / "log.txt")
    return shlex.join(
        ["bash", "-o", "pipefail", "-c", _LOGGED, log, "python", "-P", "-m", "hotloop", *_DRIVER, str(plan)]
    )


def _words(plan: Path) -> list[str]:
    return [*_DRIVER, shlex.quote(str(plan))]


def _processes(request: Request) -> int:
    """Of each machine; settled in a request."""
    return int(request.job.ranks.processes)


def _share(cpus: int, request: Request) -> int:
    return max(1, cpus // _processes(request))


def _check_words(request: Request) -> None:
    """Raise InputError for what Ray cannot be told."""
    launch = request.job.launch
    if launch.image:
        raise InputError(
            f'launch.image = "{launch.image}"',
            "Ray's workers run where Ray does, in the image of the cluster",
            '--set launch.image=""; launch.ray.runtime_env.image_uri has Ray start them in another one',
        )
    if launch.setup:
        raise InputError(
            f"launch.setup has {launch.setup[0]!r}",
            "no shell starts Ray's workers",
            "launch.environment for variables, launch.ray.runtime_env for packages",
        )
