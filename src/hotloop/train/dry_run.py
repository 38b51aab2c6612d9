"""What a job would train: all of it prepared, nothing started."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from hotloop.core.job import Job
from hotloop.core.machine import Machine
from hotloop.core.run import Run, require_run_place
from hotloop.train.checkpoint.checkpointer import (
    RESUME_ANOTHER,
    Loaded,
    named_checkpoint,
    newest_path,
    refuse_set_aside,
)
from hotloop.train.prepare import Ready, check_last_batch, count_parameters, count_steps, prepare
from hotloop.train.ranks import inner
from hotloop.train.resolve import Choice, choose_parallel
from hotloop.train.resume import check_device, check_identity, identity
from hotloop.train.resume_point import saved_since
from hotloop.train.sharded import check_divisible
from hotloop.train.world import DIVIDED, World, check_shardable, check_share, in_teams


def inspect_job(job: Job, machine: Machine, processes: int = 1, resume: str = "auto") -> dict[str, Any]:
    """What a job would train, found by preparing all of it but starting nothing.

    Args:
        processes: that would train it together.
        resume: as of `train_job`; the checkpoint is read whole, and nothing is set aside.

    Raises:
        InputError: as `train_job`.
        CheckpointError: what is to be continued cannot be read.
    """
    require_run_place(job)
    world = in_teams(World(size=processes, local_size=processes), job)
    check_share(job, world.data_size)
    ready = prepare(job, replace(machine, cpus=max(1, machine.cpus // processes)), lambda text: None)
    sizes = [len(dataset) for dataset, _ in ready.datasets]
    check_last_batch(ready.job, ready.task, ready.step.model, sizes[0], world.data_size)
    continued = _continued(job, ready, resume)
    return {
        "model": ready.job.model.name,
        "parameters": count_parameters(ready.step.model),
        "train_samples": sizes[0],
        "val_samples": sizes[1] if len(sizes) > 1 else 0,
        "steps": count_steps(ready.job, sizes[0]),
        "processes": processes,
        "device": ready.job.device,
        "precision": ready.job.precision,
        "workers": ready.job.data.workers,
        "flops_per_sample": ready.arithmetic.flops_per_sample,
        "resumed_from": str(continued.path) if continued else "",
        "chosen": {one.key: {"value": one.value, "why": one.why} for one in _chosen(job, ready, world)},
    }


def _continued(job: Job, ready: Ready, resume: str) -> Loaded | None:
    """The checkpoint that it would go on from.

    Raises:
        InputError: there is none, or it is of something else.
        CheckpointError: it cannot be read, or all there are were set aside.
    """
    run = Run(Path(job.run.dir)) if job.run.dir else None
    if run and saved_since(run, job, resume):
        resume = "auto"
    if resume == "auto" and run and newest_path(run.checkpoints):
        loaded = named_checkpoint(run.directory, lazily=True)
    elif resume not in ("auto", "never"):
        loaded = named_checkpoint(Path(resume), lazily=True)
    else:
        if resume == "auto" and run and not job.checkpoint.copy_to:
            refuse_set_aside(run.checkpoints, RESUME_ANOTHER)
        return None
    check_identity(loaded, identity(ready.job, inner(ready.step.model), ready.datasets[0][0]))
    check_device(loaded, ready.choices)
    return loaded


def _chosen(job: Job, ready: Ready, world: World) -> list[Choice]:
    """What "auto" would stand for with so many ranks; one alone has prepared it.

    Raises:
        InputError: the model cannot be divided among them.
    """
    if world.size == 1:
        return ready.choices
    speed = ready.job.speed.model_copy(update={"graph": job.speed.graph})
    asked = ready.job.model_copy(update={"parallel": job.parallel, "speed": speed})
    several, taken = choose_parallel(asked, ready.step.model, world)
    if several.parallel in DIVIDED:
        check_shardable(several)
        check_divisible(ready.step.model, weights="fsdp" in several.parallel, team=world.tensor)
    return [choice for choice in ready.choices if choice.key not in ("parallel", "speed.graph")] + taken
