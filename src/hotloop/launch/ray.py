"""Ray: a driver that starts the training by Ray Train, as a job of the cluster or as a process of this machine."""

import importlib.util
import json
import logging
import os
import shlex
import socket
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hotloop.core.environment import environment
from hotloop.core.errors import HotloopError, InputError
from hotloop.core.files import write_atomic
from hotloop.core.units import count
from hotloop.launch.detached import is_alive, start_detached, terminate
from hotloop.launch.ending import first_error, read_end
from hotloop.launch.engine import Document, read_log
from hotloop.launch.ray_plan import PLAN, QUIET, is_web, make_plan, read_plan, render_plan
from hotloop.launch.record import Launch
from hotloop.launch.request import Request
from hotloop.launch.status import Status

_PATIENCE_SECONDS = 5.0
_ENDED = ("STOPPED", "SUCCEEDED", "FAILED")


class Ray:
    """A cluster of Ray: its dashboard takes jobs; elsewhere the driver is a process of this machine."""

    look_seconds = 1.0

    def gpus(self) -> int:
        """Nobody knows on which machines it will run."""
        raise InputError(
            "how many GPUs of each machine are wanted is not said", "machines of a cluster differ", "--gpus 8"
        )

    def check(self, request: Request) -> None:
        """That Ray is there, and has room for all workers."""
        _check_installed()
        plan = make_plan(request)
        if plan["address"] == "local":
            return
        own, address = request.job.launch.ray, plan["address"]
        machines = _machines_by_web(address) if is_web(address) else _machines(address)
        scaling = plan["scaling_config"]
        number, each = scaling["num_workers"], scaling["resources_per_worker"]
        room = sum(_room(machine, each) for machine in machines)
        if room < number and not own.autoscaling:
            raise InputError(
                f"{count(number, 'worker')} of {_words(each)} each are asked for; Ray has room for {room}",
                f"at {address}: {count(len(machines), 'machine')} with {_words(_total(machines))} in all",
                "fewer --nodes or --gpus; --set launch.ray.autoscaling=true if the cluster grows when it is asked",
            )

    def documents(self, requests: Sequence[Request]) -> list[Document]:
        """What the driver reads, and Ray is told of; of a sweep, for each run."""
        plans = [make_plan(request) for request in requests]
        if len(plans) > 1 and plans[0]["address"] == "local":
            raise InputError(
                f"a sweep of {len(plans)}, each on a Ray of its own here",
                "they would share this machine and slow each other",
                "ray start --head, then --set launch.ray.address=auto; or hotloop tune",
            )
        names = [PLAN] if len(plans) == 1 else [f"{request.name}/{PLAN}" for request in requests]
        return [Document(name, render_plan(plan)) for name, plan in zip(names, plans, strict=True)]

    def submit(self, requests: Sequence[Request]) -> list[str]:
        """Start the driver of each; the id of Ray's job, or a process number. Those of a sweep wait for each other."""
        begun: list[str] = []
        try:
            for request in requests:
                begun.append(self._submit(request))
        except HotloopError:
            for identity in begun:  # jobs: a process of this machine is not refused
                with _client(make_plan(requests[0])["address"]) as client:
                    client.stop_job(identity)
            raise
        return begun

    def _submit(self, request: Request) -> str:
        plan = make_plan(request)
        write_atomic(request.folder / PLAN, render_plan(plan))
        if not is_web(plan["address"]):
            return start_detached(shlex.split(plan["entrypoint"]), request)
        with _client(plan["address"]) as client:
            try:
                job: str = client.submit_job(
                    entrypoint=plan["entrypoint"], runtime_env=plan["runtime_env"], metadata={"name": request.name}
                )
            except RuntimeError as error:
                raise InputError("Ray refuses it", _last_line(error), "hotloop launch ... --dry-run shows it") from None
        return job

    def status(self, launch: Launch) -> Status:
        """By what the driver has left, its process or job, and what the workers have noted."""
        hosts = _begun(launch)
        starts = len(hosts)
        if end := read_end(launch):
            return Status(end.state, end.reason, starts=starts)
        state, said = self._driver(launch)
        if state == "elsewhere":
            return Status("lost", said, starts=starts)
        if state == "ended":  # it may have left its word meanwhile
            left = read_end(launch) or Status("lost", first_error(launch) or said)
            if left.state == "lost" and launch.cancel_file.exists():
                left = Status("cancelled")
            return Status(left.state, left.reason, starts=starts)
        if state == "running" and hosts and (Path(launch.folder) / "begun").exists():
            return Status("running", hosts=hosts[-1], starts=starts)
        return Status("waiting", said, starts=starts)

    def log(self, launch: Launch, follow: bool) -> Iterator[str]:
        """Of its file, which the driver writes."""
        return read_log(launch.log_file, follow, lambda: self.status(launch).ended, self.look_seconds)

    def cancel(self, launch: Launch) -> None:
        """A file that the workers look at; the driver itself is told where there are none yet."""
        write_atomic(Path(launch.folder) / "stop", "hotloop launch cancel")
        if self.status(launch).state != "waiting":
            return
        if launch.id.isdigit():
            terminate(launch)
            return
        with _client(_address(launch)) as client:
            client.stop_job(launch.id)

    def _driver(self, launch: Launch) -> tuple[str, str]:
        """Whether it is waiting, running, ended or elsewhere, and words for it."""
        if launch.id.isdigit():
            if launch.host != os.uname().nodename:
                return "elsewhere", f"it was started on {launch.host}, and can be asked there"
            alive = is_alive(launch)
            return ("running", "its workers have not begun") if alive else ("ended", "its process is gone")
        _check_installed()
        with _client(_address(launch)) as client:
            try:
                job = client.get_job_info(launch.id)
            except RuntimeError as error:
                if "does not exist" in str(error):
                    return "ended", f"Ray knows no job {launch.id}"
                raise HotloopError("Ray does not say how it stands", _last_line(error), "ask again later") from None
        name = str(job.status.value)
        said = job.message or "" if name in _ENDED else "its workers have not begun"
        return ("ended" if name in _ENDED else "waiting" if name == "PENDING" else "running"), said


def _begun(launch: Launch) -> list[str]:
    """On which hosts each start was, of those that were noted in the run."""
    try:
        lines = (Path(launch.run_dir) / "starts.jsonl").read_text().splitlines()
    except OSError:
        return []
    begin = launched_words(launch.name, "")
    found = [str(json.loads(line).get("launched", "")) for line in lines]
    return [words.removeprefix(begin) for words in found if words.startswith(begin)]


def launched_words(name: str, hosts: str) -> str:
    """What a run notes of its start."""
    return f"ray {name} on {hosts}"


def _address(launch: Launch) -> str:
    address: str = read_plan(Path(launch.folder) / PLAN)["address"]
    return address


def _check_installed() -> None:
    if importlib.util.find_spec("ray") is None:
        raise InputError("launching on Ray needs ray", "it is not installed here", 'pip install "hotloop[ray]"')


@contextmanager
def _quiet() -> Iterator[None]:
    """Ray's own variables aside: the job's address counts."""
    absent = dict.fromkeys(("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"))
    quiet = {name: value for name, value in QUIET.items() if name not in os.environ}
    with environment({**absent, **quiet}), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _client(address: str) -> Iterator[Any]:
    """What hands jobs to a dashboard."""
    with _quiet():
        from ray.job_submission import JobSubmissionClient

        try:
            client = JobSubmissionClient(address)
        except (ConnectionError, RuntimeError) as error:
            raise _absent(address, _last_line(error)) from None
        yield client


def _machines_by_web(address: str) -> list[Mapping[str, float]]:
    with _client(address):
        from ray.util.state import list_nodes

        try:
            nodes = list_nodes(address=address, timeout=int(_PATIENCE_SECONDS), filters=[("state", "=", "ALIVE")])
        except Exception as error:  # of many kinds, as the state's service is one of its own
            raise _absent(address, _last_line(error)) from None
        return [node.resources_total for node in nodes]


def _machines(address: str) -> list[Mapping[str, float]]:
    """What each machine has, by name of Ray."""
    host, _, port = address.rpartition(":")
    if port.isdecimal():  # Ray itself would try for minutes
        try:
            socket.create_connection((host, int(port)), _PATIENCE_SECONDS).close()
        except OSError as error:
            raise _absent(address, error.strerror or str(error)) from None
    with _quiet():
        import ray

        try:
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise _absent(address, _last_line(error)) from None
        try:
            return [node["Resources"] for node in ray.nodes() if node["Alive"]]
        finally:
            ray.shutdown()


def _room(machine: Mapping[str, float], each: Mapping[str, float]) -> int:
    """How many workers a machine takes when it is empty."""
    return int(min(machine.get(name, 0.0) // amount for name, amount in each.items()))


def _total(machines: list[Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(machine.get(name, 0.0) for machine in machines) for name in ("GPU", "CPU", "memory")}


def _words(resources: Mapping[str, float]) -> str:
    found = [count(int(resources[name]), name) for name in ("GPU", "CPU") if name in resources]
    return ", ".join([*found, *([f"{resources['memory'] / 2**30:.0f} GiB"] if resources.get("memory") else [])])


def _absent(address: str, said: str) -> InputError:
    where = "on this machine" if address == "auto" else f"at {address}"
    return InputError(
        f"there is no Ray {where}", said, "--set launch.ray.address=http://HEAD:8265, or here: ray start --head"
    )


def _last_line(error: Exception) -> str:
    return next((line for line in reversed(str(error).strip().splitlines()) if line), type(error).__name__)
