"""`hotloop train`."""

import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from hotloop.core.environment import for_training
from hotloop.core.errors import HotloopError, InputError
from hotloop.core.installed import require_torch
from hotloop.core.job import Job
from hotloop.core.job_file import load_job
from hotloop.core.machine import read_machine
from hotloop.core.run import Result, Run, plain
from hotloop.core.stopping import STOPPED_EARLY, stop_at_once
from hotloop.core.tuning import ProcessSettings
from hotloop.core.units import count, escaped, format_amount, format_seconds
from hotloop.launch.fruitless import STARTS, count_start


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("file", metavar="JOB", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Lay a value over the file's.")
@click.option(
    "--resume",
    default="auto",
    metavar="auto|never|PATH",
    help="auto: continue the run in run.dir, if there is one (default). never: set it aside and start anew. "
    "PATH: continue a checkpoint or a run; the same command again goes on from what it has saved since.",
)
@click.option("--settings", type=click.Path(path_type=Path), help="What `hotloop tune` has found for this job.")
@click.option("--nnodes", type=click.IntRange(1), default=1, metavar="N", help="Machines that train it together.")
@click.option("--node-rank", type=click.IntRange(0), default=0, metavar="K", help="The number of this one, from 0.")
@click.option("--rdzv-endpoint", default="", metavar="HOST:PORT", help="Of the first machine, where all meet.")
@click.option("--rdzv-id", default="hotloop", metavar="ID", help="The same on all machines; another for each start.")
@click.option("--dry-run", is_flag=True, help="Check job, data and model, say what would be trained, and stop.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
def train(
    file: Path, overrides: tuple[str, ...], resume: str, settings: Path | None, nnodes: int, node_rank: int,
    rdzv_endpoint: str, rdzv_id: str, dry_run: bool, as_json: bool,
) -> int:  # fmt: skip
    """Train what a job file asks for.

    Ctrl-C or SIGTERM saves at the next step and exits with 75; the same command continues if the job has a run.dir.
    On several machines each is started with the same words and a --node-rank of its own.
    """
    _stop_early()
    tuned: list[str] = []
    process = ProcessSettings()
    if settings:
        from hotloop.tune.settings import read_job_settings

        tuned, process = read_job_settings(settings)
        os.environ.update(process.environment)
    job = load_job(file, [*tuned, *overrides])
    host, port = _place(nnodes, node_rank, rdzv_endpoint)
    require_torch()
    set_environment()
    # "module:name" in a job means the user's own files; last, so that one named like a library does not stand for it.
    sys.path.append(os.getcwd())
    if dry_run:
        from hotloop.train.dry_run import inspect_job

        plan = inspect_job(job, read_machine(), _processes(job, nnodes) * nnodes, resume)
        click.echo(json.dumps(plan) if as_json else _plan(plan))
        return 0
    starts = os.environ.pop(STARTS, "")  # the ranks that this starts are one start
    if starts and job.run.dir and node_rank == 0:
        count_start(Path(starts), Run(Path(job.run.dir)).checkpoints)
    command = _command(file, overrides, settings)
    if (number := _processes(job, nnodes)) > 1 or nnodes > 1:
        from hotloop.train.elastic import train_in_ranks
        from hotloop.train.gpus import answering_gpus
        from hotloop.train.machines import ONE, Nodes
        from hotloop.train.world import team_size

        in_ranks = [*command, "--resume", resume, *(["--json"] if as_json else [])]
        alone = nnodes == 1
        nodes = ONE if alone else Nodes(nnodes, node_rank, host, port, rdzv_id)
        answering = answering_gpus if alone and job.device != "cpu" else None
        return train_in_ranks(in_ranks, number, job.ranks, _tell, answering, team_size(job, number * nnodes), nodes)
    return _train(command, job, resume, as_json, process.numa)


def _stop_early() -> None:
    """SIGTERM and Slurm's SIGUSR1 while torch is still imported are stops like any other. Ranks leave them to who has
    started them.
    """
    for number in (signal.SIGTERM, signal.SIGUSR1):
        if "RANK" not in os.environ and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, stop_at_once)


def _place(nnodes: int, node_rank: int, endpoint: str) -> tuple[str, int]:
    """Where so many machines meet.

    Raises:
        InputError: it is not said, or there is no such machine.
    """
    if node_rank >= nnodes:
        raise InputError(
            f"--node-rank {node_rank} is not less than --nnodes {nnodes}", "machines count from 0",
            f"--node-rank {nnodes - 1} for the last",
        )  # fmt: skip
    host, _, port = endpoint.rpartition(":")
    if nnodes > 1 and not (host and port.isdecimal() and 0 < int(port) < 65000):
        raise InputError(
            f"--rdzv-endpoint {endpoint!r} is no host and port", f"{nnodes} machines have to meet somewhere",
            "--rdzv-endpoint FIRST_MACHINE:29500",
        )  # fmt: skip
    return host, int(port) if nnodes > 1 else 0


def set_environment() -> None:
    """Set what is read once, when torch is imported or the GPU is first used; what is set already stays."""
    os.environ.update(for_training(os.environ))


def _processes(job: Job, nodes: int) -> int:
    """How many to start; 1: this one trains, alone or as one of several that somebody else has started.

    Raises:
        InputError: the machines are given twice.
    """
    from hotloop.train.world import is_rank, processes_for, unused_gpus

    if is_rank() and nodes > 1:
        raise InputError(
            f"--nnodes {nodes} within torchrun", "WORLD_SIZE and RANK are set already", "leave out --nnodes"
        )
    if is_rank():
        return 1
    number = processes_for(job, nodes)
    if unused := unused_gpus(job, number):
        _tell(unused)
    return number


def _command(file: Path, overrides: tuple[str, ...], settings: Path | None) -> list[str]:
    """What trains, and continues, this job."""
    laid_over = [word for override in overrides for word in ("--set", override)]
    tuned = ["--settings", str(settings)] if settings else []
    return ["hotloop", "train", str(file), *laid_over, *tuned]


def _tell(text: str) -> None:
    click.echo(f"hotloop: {text}", err=True)


def _train(command: Sequence[str], job: Job, resume: str, as_json: bool, one_node: bool) -> int:
    """Train in this process."""
    from hotloop.cli.progress import rank_observer, terminal_observer
    from hotloop.train.numa import bind, stay_on_one_node
    from hotloop.train.patience import StopRequested
    from hotloop.train.training import train_job
    from hotloop.train.world import BY_OTHERS, PEER_LOST, joined_world, peer_lost

    machine = read_machine()  # before this process stays on some of its processors: ranks share all, tune has seen all
    with joined_world(job.device, job.ranks.timeout.amount) as world:
        if world.local_size > 1 and job.device != "cpu" and (bound := bind(world.local_rank, world.local_size)):
            _tell(bound)
        if world.local_size == 1 and one_node:
            stay_on_one_node(job.device)
        try:
            with standard_output_to_error() if as_json else nullcontext():
                observer = terminal_observer() if world.first else rank_observer(world.rank)
                last = not world.folder  # else the agent that has started this rank may end it at any time
                run, result = train_job(job, machine, observer, resume, world=world, last=last)
        except StopRequested:  # of one of several ranks, while the others wait for it; what was saved last is kept
            world.note("code", str(STOPPED_EARLY))
            raise SystemExit(STOPPED_EARLY) from None
        except HotloopError as error:
            world.note("code", str(error.exit_code))
            if not world.claims("error"):
                raise SystemExit(error.exit_code) from None
            raise
        except Exception as error:
            if world.size == 1 or not (gone := peer_lost(error)):
                world.claims("traceback")
                raise
            if any(word in str(error) for word in BY_OTHERS):
                world.note(f"{PEER_LOST}-{world.rank}", gone)
            told = world.claimed("error", "traceback")
            raise SystemExit(1 if told else f"rank {world.rank} ends: {gone}") from None
        code = 0 if result.status == "finished" else STOPPED_EARLY
        if world.local_rank == 0:
            world.note("code", str(code))
        if world.first:
            if as_json:
                click.echo(json.dumps(plain({"run": str(run.directory), **asdict(result)})))
            else:
                click.echo(summary(command, run, result, fixed=job.run.dir is not None))
        return 0 if world.folder else code  # else the agent that has started this rank would take it for lost


def _plan(plan: dict[str, Any]) -> str:
    chosen = plan.pop("chosen")
    lines = [f"{name}: {value}" for name, value in plan.items()]
    return "\n".join([*lines, *(f"{key} = {one['value']}: {one['why']}" for key, one in chosen.items())])


@contextmanager
def standard_output_to_error() -> Iterator[None]:
    """Send what the user's code prints, here and in the workers, where progress goes: `--json` is one object."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _speed(result: Result) -> str:
    parts = [format_amount(result.samples_per_second, "samples/s")]
    if result.tokens_per_second:
        parts.append(format_amount(result.tokens_per_second, "tokens/s"))
    if result.mfu:
        matrix = format_amount(result.matrix_flops_per_second, "FLOP/s")
        parts.append(f"{format_amount(result.flops_per_second, 'FLOP/s')} (MFU {100 * result.mfu:.1f} % of {matrix})")
    return ", ".join(parts)


def summary(command: Sequence[str], run: Run, result: Result, fixed: bool) -> str:
    """What came out of a run, in a few lines.

    Args:
        command: that trains the job.
        fixed: whether the job names its run.dir.
    """
    here = Path.cwd()
    directory = run.directory.relative_to(here) if run.directory.is_relative_to(here) else run.directory
    figures = "  ".join(f"{name} {value:.4f}" for name, value in result.metrics.items())
    lines = [
        f"{result.status} after {result.steps:,} steps, {format_seconds(result.train_seconds)} of training",
        figures,
        f"{_speed(result)}, {100 * result.data_wait_share:.1f} % of the time waiting for data",
    ]
    if result.data_speed_share:
        held_up = f": {result.data_advice}" if result.data_advice else ""
        lines.append(f"{100 * result.data_speed_share:.0f} % of the speed with the data on the device{held_up}")
    if result.captured:
        lines.append("steps were replayed as CUDA graphs")
    if died := result.workers_replaced:
        lines.append(f"{count(died, 'data worker')} died and {'was' if died == 1 else 'were'} replaced")
    if result.corrupt_files:
        were = "file was" if len(result.corrupt_files) == 1 else "files were"
        lines.append(f"{len(result.corrupt_files)} damaged {were} replaced, in validation left out:")
        lines += [escaped(f"  {damaged['path']}: {damaged['reason']}") for damaged in result.corrupt_files]
    if result.status == "preempted":
        again = shlex.join([*command, *([] if fixed else ["--set", f"run.dir={directory}"])])
        done = "saved" if result.steps else "stopped before its first step"
        lines.append(f"{done}, as {result.stopped_by} asked; to continue: {again}")
    if run.report_file.exists():
        lines.append(f"report: {directory}/{run.report_file.name}")
    return "\n".join(line for line in lines if line)
