"""The driver of a launch on Ray: has Ray Train start the workers, and starts again what was interrupted."""

import io
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import click

from hotloop.core.errors import HotloopError, InputError
from hotloop.core.files import write_atomic
from hotloop.core.run import Run
from hotloop.core.stopping import STOPPED_EARLY
from hotloop.launch.ray_plan import is_web, read_plan

_FRUITLESS = 5
"""So many starts in a row that have saved nothing new are the last."""
_WAIT_SECONDS = 10.0
"""Before another start after one that has saved nothing; twice as long each time."""
_READ_AT_IMPORT = {"RAY_COLOR_PREFIX": "0", "RAY_DEDUP_LOGS": "0"}
"""By Ray: lines of workers as they are."""


def drive(file: Path) -> int:
    """Run a plan to its end, and leave a word how that was.

    Raises:
        HotloopError: the training failed.
    """
    folder = file.parent
    plan = read_plan(file)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # what workers write is to be read while they do
    (folder / "end").unlink(missing_ok=True)
    cancelled = folder / "cancelled"
    try:
        state = _Driver(folder, plan).run()
    except HotloopError as error:
        _leave(folder, "cancelled" if cancelled.exists() else f"failed {error.what}")
        raise
    except Exception as error:
        _leave(folder, f"failed {type(error).__name__}")
        raise
    _leave(folder, "cancelled" if cancelled.exists() and state != "finished" else state)
    return 0 if state == "finished" else STOPPED_EARLY


def _leave(folder: Path, word: str) -> None:
    (folder / "stop").unlink(missing_ok=True)
    write_atomic(folder / "end", word + "\n")


class _Driver:
    """One plan.

    Args:
        folder: of the launch.
    """

    def __init__(self, folder: Path, plan: dict[str, Any]) -> None:
        self._folder = folder
        self._plan = plan
        self._stopped = threading.Event()
        self._fitting = False

    def run(self) -> str:
        """Until it has finished, or is asked to stop: finished or saved.

        Raises:
            HotloopError: it failed.
        """
        os.environ.update({**_READ_AT_IMPORT, **self._plan["runtime_env"]["env_vars"]})
        import ray

        _connect(self._plan)
        signal.signal(signal.SIGTERM, self._stop)  # Ray has set one of its own
        try:
            return self._run()
        except KeyboardInterrupt:  # of _stop
            return "saved"
        finally:
            ray.shutdown()

    def _run(self) -> str:
        start, fruitless = 0, 0
        while not self._is_over():
            start += 1
            saved = self._saved()
            if self._fit(start) == "finished":
                return "finished"
            if self._is_over():
                break
            fruitless = 0 if self._saved() != saved else fruitless + 1
            if fruitless == _FRUITLESS:
                raise HotloopError(
                    f"{_FRUITLESS} starts in a row have saved nothing", "each was stopped before it could",
                    "hotloop launch logs NAME says by what",
                )  # fmt: skip
            click.echo("hotloop: stopped early; starting it again", err=True)
            self._stopped.wait(_WAIT_SECONDS * 2 ** (fruitless - 1) if fruitless else 0)
        return "saved"

    def _is_over(self) -> bool:
        """Whether it is to stop for good; clears what has stopped the workers before."""
        (self._folder / "stop").unlink(missing_ok=True)
        (self._folder / "begun").unlink(missing_ok=True)
        return self._stopped.is_set() or (self._folder / "cancelled").exists()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._stopped.set()
        write_atomic(self._folder / "stop", signal.Signals(number).name)
        if self._fitting and not (self._folder / "begun").exists():
            raise KeyboardInterrupt  # before there are workers that could stop; Ray lets no other one through

    def _saved(self) -> set[Path]:
        return set(Run(Path(self._plan["training"]["run_dir"])).checkpoints.glob("*"))

    def _fit(self, start: int) -> str:
        """Start the workers and wait for their end: finished or preempted.

        Raises:
            HotloopError: it failed.
        """
        import ray
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
        from ray.train.v2.api.exceptions import TrainingFailedError
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from hotloop.cli.ray_worker import Outcome, Ranks, train_as_worker

        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        outcome = ray.remote(num_cpus=0, scheduling_strategy=here)(Outcome).remote()
        config = self._plan["run_config"]
        trainer = DataParallelTrainer(
            train_as_worker,
            train_loop_config={**self._plan["training"], "folder": str(self._folder), "outcome": outcome},
            backend_config=Ranks(config["name"]),
            scaling_config=ScalingConfig(**self._plan["scaling_config"]),
            run_config=RunConfig(
                **{**config, "name": f"{config['name']}-{start}"},
                failure_config=FailureConfig(**self._plan["failure_config"]),
            ),
        )
        failure = ""
        self._fitting = True
        try:
            trainer.fit()
        except TrainingFailedError as error:
            failure = _cause(error)
        finally:
            self._fitting = False
        told = ray.get(outcome.told.remote())
        if told and told.status == "failed":
            raise (InputError if told.exit_code == InputError.exit_code else HotloopError)(*told.error)
        if failure or not told:
            raise HotloopError(
                f"the workers failed, after {self._plan['failure_config']['max_failures']} starts again",
                failure or "they have not said what became of it", "--set launch.ray.max_failures=N for more of them",
            )  # fmt: skip
        click.echo(told.text)
        return str(told.status)


def _connect(plan: dict[str, Any]) -> None:
    """To the Ray of the plan; a driver that is a job of it has got its variables already."""
    import ray

    is_job = is_web(plan["address"])
    address = "auto" if is_job else plan["address"]
    runtime_env = None if is_job else plan["runtime_env"]
    dashboard = False if address == "local" else None
    try:
        ray.init(address, runtime_env=runtime_env, include_dashboard=dashboard, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise HotloopError(
            f"Ray at {plan['address']} does not take the driver", " ".join(str(error).split()), "ray status"
        ) from None


def _cause(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
