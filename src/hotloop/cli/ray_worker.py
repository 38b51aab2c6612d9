"""A rank that is a worker of Ray Train, and what the ranks tell the driver."""

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.train.backend import Backend, BackendConfig

from hotloop.core.errors import HotloopError, InputError
from hotloop.core.files import write_atomic
from hotloop.core.job_file import load_job
from hotloop.core.machine import read_machine
from hotloop.core.run import LAUNCHED
from hotloop.launch.ray import launched_words

_LOOK_SECONDS = 1.0
_TOGETHER_SECONDS = 5.0


@dataclass(frozen=True)
class Told:
    """How the training has ended, for a while or for good.

    Attributes:
        status: finished, preempted, or failed.
        text: the summary, or the error.
    """

    status: str
    text: str
    error: tuple[str, str, str] = ("", "", "")
    exit_code: int = 1


class Outcome:
    """Holds what is told first; an actor beside the driver, as machines may see no file of each other."""

    def __init__(self) -> None:
        self._told: Told | None = None
        self._ranks: set[int] = set()

    def tell(self, rank: int, told: Told) -> None:
        self._told = self._told or told
        self._ranks.add(rank)

    def told(self) -> Told | None:
        return self._told

    def ranks(self) -> int:
        return len(self._ranks)


class Ranks(BackendConfig):  # type: ignore[misc]
    """Has the workers meet as torchrun's ranks do; hotloop itself makes their process group.

    Args:
        name: of the launch.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def backend_cls(self) -> type[Backend]:
        return _Meeting


class _Meeting(Backend):  # type: ignore[misc]
    share_cuda_visible_devices = True  # then a rank's number on its machine is its GPU's

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        hosts = worker_group.execute(ray.util.get_node_ip_address)
        port = worker_group.execute_single(0, _free_port)
        launched = launched_words(backend_config.name, ", ".join(dict.fromkeys(hosts)))
        worker_group.execute(_set, {"MASTER_ADDR": hosts[0], "MASTER_PORT": str(port), LAUNCHED: launched})


def _set(variables: dict[str, str]) -> None:
    os.environ.update(variables)  # itself it would be sent with a copy of these variables


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("", 0))
        return int(one.getsockname()[1])


def train_as_worker(settings: dict[str, Any]) -> None:
    """Train as one of the workers; what came of it is told to the outcome.

    What is raised has Ray end all workers and start them again; what would come again is told instead.

    Args:
        settings: of the plan's training, with its folder and the outcome.
    """
    outcome = settings["outcome"]
    if ray.get(outcome.told.remote()):  # these are started again because of an error that would come again
        return
    context = ray.train.get_context()
    numbers = {"RANK": context.get_world_rank(), "WORLD_SIZE": context.get_world_size(),
               "LOCAL_RANK": context.get_local_rank(), "LOCAL_WORLD_SIZE": context.get_local_world_size()}  # fmt: skip
    os.environ.update({name: str(value) for name, value in numbers.items()})
    stop = Path(settings["folder"]) / "stop"
    try:
        _check_paths(settings)
        with _draining_noticed(stop) if context.get_local_rank() == 0 else nullcontext():
            _train(settings, stop)
    except HotloopError as error:
        told = Told("failed", str(error), (error.what, error.cause, error.fix), error.exit_code)
        ray.get(outcome.tell.remote(context.get_world_rank(), told))
        _leave_together(outcome, context.get_world_size(), error)


def _train(settings: dict[str, Any], stop: Path) -> None:
    """In this process, as `hotloop train` does in a rank's.

    Raises:
        HotloopError: what would come again.
        RuntimeError: another rank is gone, or what may go better the next time.
    """
    from hotloop.cli.train import set_environment, summary

    os.chdir(settings["directory"])
    set_environment()
    sys.path.append(settings["directory"])  # "module:name" in a job means the user's own files
    from hotloop.cli.main import unexpected
    from hotloop.cli.progress import rank_observer, terminal_observer
    from hotloop.train.observer import Event, Logged, Observer, Observers, Saved, Validated
    from hotloop.train.patience import StopRequested
    from hotloop.train.training import train_job
    from hotloop.train.world import joined_world, peer_lost

    class Reports(Observer):
        """Tells Ray the figures of each epoch. Checkpoints are hotloop's own, which resumes from them by itself."""

        progressed = False

        def on(self, event: Event) -> None:
            self.progressed |= isinstance(event, Logged | Saved | Validated)
            if isinstance(event, Validated):
                ray.train.report({**event.progress.metrics, "epoch": event.progress.epoch, "step": event.progress.step})

    outcome, rank = settings["outcome"], int(os.environ["RANK"])
    job = load_job(Path(settings["job"]), [])
    reports = Reports()
    try:
        with joined_world(job.device, job.ranks.timeout.amount) as world:
            if world.first:
                (stop.parent / "begun").touch()
            shown = terminal_observer() if world.first else rank_observer(world.rank)
            run, result = train_job(
                job, read_machine(), Observers([shown, reports]), world=world, stop_file=str(stop)
            )  # fmt: skip
            if world.first:
                text = summary(["hotloop", "train", settings["job"]], run, result, fixed=True)
                ray.get(outcome.tell.remote(rank, Told(result.status, text)))
    except StopRequested:  # of one of several ranks, while the others wait for it; what was saved last is kept
        ray.get(outcome.tell.remote(rank, Told("preempted", "stopped while it waited for data")))
    except HotloopError:
        raise
    except Exception as error:
        gone = peer_lost(error)
        if gone and ray.get(outcome.told.remote()):
            ray.get(outcome.tell.remote(rank, Told("failed", gone)))
            return
        if gone or reports.progressed:
            raise RuntimeError(f"rank {rank}: {gone or error}") from None if gone else error
        raise unexpected(error) from error


def _check_paths(settings: dict[str, Any]) -> None:
    for path in (settings["directory"], settings["job"]):
        if not Path(path).exists():
            raise InputError(
                f"{path} does not exist on {ray.util.get_node_ip_address()}",
                "a training needs the same files on all its machines",
                "start it in a folder that all machines share",
            )


def _leave_together(outcome: Any, size: int, error: HotloopError) -> None:
    """Return once all ranks have met with an error.

    Raises:
        RuntimeError: they have not; Ray ends those that wait for this one.
    """
    end = time.monotonic() + _TOGETHER_SECONDS
    while ray.get(outcome.ranks.remote()) < size:
        if time.monotonic() > end:
            raise RuntimeError(error.what)
        time.sleep(0.1)


@contextmanager
def _draining_noticed(stop: Path) -> Iterator[None]:
    """Meanwhile, have all ranks save and stop when Ray is about to take this machine away."""
    over = threading.Event()
    here = ray.get_runtime_context().get_node_id()

    def watch() -> None:
        from ray._private.state import state

        while not over.wait(_LOOK_SECONDS):
            with suppress(Exception):  # of a head that does not answer for a moment
                if here in state.get_draining_nodes():
                    write_atomic(stop, f"Ray drains {ray.util.get_node_ip_address()}")
                    return

    thread = threading.Thread(target=watch, name="hotloop-drain", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
