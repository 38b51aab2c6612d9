"""What a job would train: all of it prepared, nothing started."""

from dataclasses import replace
from typing import Any

from hotloop.core.job import Job
from hotloop.core.machine import Machine
from hotloop.train.prepare import Ready, check_last_batch, count_parameters, count_steps, prepare
from hotloop.train.resolve import Choice, choose_parallel
from hotloop.train.sharded import check_divisible
from hotloop.train.world import DIVIDED, TENSOR, World, check_shardable, check_share, in_teams


def inspect_job(job: Job, machine: Machine, processes: int = 1) -> dict[str, Any]:
    """What a job would train, found by preparing all of it but starting nothing.

    Args:
        processes: that would train it together.

    Raises:
        InputError: as `train_job`.
    """
    world = in_teams(World(size=processes, local_size=processes), job)
    check_share(job, world.data_size)
    ready = prepare(job, replace(machine, cpus=max(1, machine.cpus // processes)), lambda text: None)
    sizes = [len(dataset) for dataset, _ in ready.datasets]
    check_last_batch(ready.job, ready.task, ready.step.model, sizes[0], world.data_size)
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
        "chosen": {one.key: {"value": one.value, "why": one.why} for one in _chosen(job, ready, world)},
    }


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
        check_divisible(ready.step.model, weights="fsdp" in several.parallel, layers=several.parallel in TENSOR)
    return [choice for choice in ready.choices if choice.key not in ("parallel", "speed.graph")] + taken
