"""What "auto" means on this machine."""

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hotloop.core.errors import InputError
from hotloop.core.job import Job
from hotloop.core.machine import Machine
from hotloop.core.units import count, format_bytes, format_seconds
from hotloop.data.loader import workers_for
from hotloop.train.compiler import keep_compiled_code
from hotloop.train.precision import choose_precision
from hotloop.train.sharded import indivisible
from hotloop.train.world import ALONE, DIVIDED, World, needs_whole


@dataclass(frozen=True)
class Choice:
    """What an "auto" stands for on this machine, and why."""

    key: str
    value: object
    why: str


def resolve(job: Job, machine: Machine, world: World = ALONE) -> tuple[Job, list[Choice]]:
    """The job with every "auto" that is known before the start replaced by what it stands for.

    Args:
        machine: this process's part of it.

    Raises:
        InputError: the job asks for a GPU or a precision that is not there.
    """
    if job.device == "cuda" and not torch.cuda.is_available():
        raise InputError(
            'device = "cuda", and torch sees no GPU',
            f"torch {torch.__version__}, driver {machine.driver or 'none'}, {len(machine.gpus)} cards",
            "--set device=cpu, or nvidia-smi to see whether the card is there",
        )
    device = job.device if job.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    accelerated = device == "cuda"
    precision, why = choose_precision(job.precision, device)
    data = job.data
    auto = [
        Choice("device", device, "torch sees a GPU" if accelerated else "torch sees no GPU"),
        Choice("precision", precision, why),
        Choice("data.val_batch_size", 2 * data.batch_size, "twice data.batch_size: nothing is kept for backward"),
        Choice("data.workers", workers_for(machine.cpus, accelerated), f"{count(machine.cpus, 'usable processor')}"),
        Choice("speed.channels_last", accelerated, "tensor cores take it" if accelerated else "it is for GPUs"),
        Choice("speed.kernels", accelerated, "where the model is compiled" if accelerated else "they are for GPUs"),
        Choice("speed.cudnn_benchmark", accelerated, "shapes are fixed" if accelerated else "it is for GPUs"),
        Choice(
            "speed.keep_memory", not accelerated, "glibc would give it back" if not accelerated else "it is for CPUs"
        ),
    ]
    ranks = job.ranks.model_copy(update={"processes": world.size})  # what there is, also where more were asked for
    return decided(job.model_copy(update={"ranks": ranks}), auto)


def choose_parallel(job: Job, model: nn.Module, world: World) -> tuple[Job, list[Choice]]:
    """Decide on `parallel`, and on `speed.graph` which depends on it, once the model is known."""
    state, room = state_bytes(job, model), torch.cuda.mem_get_info()[1] if job.device == "cuda" else 0
    room = min(world.gathered(room))  # cards may differ, and all ranks have to do the same
    fits, obstacle = not room or state <= STATE_SHARE * room, indivisible(model) or needs_whole(job)[0]
    of = f" of the GPU's {format_bytes(room)}" if room else ""
    but = f", and fsdp does not take {obstacle}" if obstacle and not fits else ""
    why = f"weights, gradients and the optimizer's state take {format_bytes(state)}{of}{but}"
    parallel = Choice("parallel", "ddp" if fits or obstacle else "fsdp", why)
    if world.size == 1:
        parallel = Choice("parallel", "none", "one process trains")
    job, taken = decided(job, [parallel])
    graph, why = job.device == "cuda", "one launch a step" if job.device == "cuda" else "it is for GPUs"
    if job.parallel in DIVIDED and world.size > 1:
        graph, why = False, "layers or their weights are of several ranks"
    job, more = decided(job, [Choice("speed.graph", graph, why)])
    return job, [*taken, *more]


STATE_SHARE = 0.6
"""Of a GPU's memory: the rest is for activations, which are not known yet."""
_STATES = {"sgd": 1, "adagrad": 1, "rmsprop": 1}
"""Tensors of the size of a weight that an optimizer keeps at the most; others keep two, as Adam does."""


def state_bytes(job: Job, model: nn.Module) -> int:
    """Memory of a model's weights, their average and their gradients, and of what the optimizer keeps."""
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    learnt = sum(one.numel() * one.element_size() for one in model.parameters() if one.requires_grad)
    return weights * (1 + (job.train.ema > 0)) + learnt * (1 + optimizer_copies(job))


def optimizer_copies(job: Job) -> int:
    """Tensors of a weight's size that a job's optimizer keeps, at the most."""
    return _STATES.get(job.optimizer.name, 2)


def choose_background(job: Job, model: nn.Module, machine: Machine, world: World) -> tuple[Job, list[Choice]]:
    """Decide on `checkpoint.background`, once the model and `parallel` are known."""
    weights = sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
    size = weights * (1 + optimizer_copies(job) + (job.train.ema > 0))
    here = size * world.local_size // world.size if job.parallel in DIVIDED else size
    fits = all(world.gathered(here <= _COPY_SHARE * machine.memory_bytes))  # as one waits for what all have written
    why = f"a checkpoint takes {format_bytes(size)}"
    if size >= _BACKGROUND_BYTES and not fits:
        why += f", and the host has {format_bytes(machine.memory_bytes)}"
    return decided(job, [Choice("checkpoint.background", size >= _BACKGROUND_BYTES and fits, why)])


_BACKGROUND_BYTES = 2**25
"""Less is on the disk in a tenth of a second, which is what it takes to start another process."""
_COPY_SHARE = 0.4
"""Of the host's memory, for the copy that is written."""


def choose_compile(job: Job, steps: int, flops_per_step: float) -> tuple[Job, list[Choice]]:
    """Decide on `speed.compile`, once the size of the run is known.

    Compiling takes about a minute and makes the step a few tens of per cent faster, so it is for runs of some minutes.
    The estimate of a run's length is the same each time: a run that continues decides as it did at first.
    """
    seconds = eager_seconds(steps, flops_per_step)
    compiled = job.device == "cuda" and seconds >= COMPILE_FROM_SECONDS and torch.cuda.get_device_capability() >= (7, 0)
    limit = format_seconds(COMPILE_FROM_SECONDS)
    why = f"about {format_seconds(seconds)} of training on a GPU; compiling pays from {limit}"
    return decided(job, [Choice("speed.compile", compiled, why if job.device == "cuda" else "it is for GPUs")])


def eager_seconds(steps: int, flops_per_step: float) -> float:
    """About what a run takes on a data-centre GPU if nothing is compiled."""
    return steps * max(_LEAST_STEP_SECONDS, flops_per_step / _EAGER_FLOPS)


COMPILE_FROM_SECONDS = 240.0
_EAGER_FLOPS = 150e12
"""FLOP/s that a model reaches uncompiled on a data-centre GPU; ResNet-50 in bf16 on an H200: 116e12."""
_LEAST_STEP_SECONDS = 0.001


def decided(job: Job, auto: list[Choice]) -> tuple[Job, list[Choice]]:
    """The job with these values where it says "auto", and those that were taken."""
    taken = []
    for choice in auto:
        *sections, name = choice.key.split(".")
        section = getattr(job, sections[0]) if sections else job
        if getattr(section, name) == "auto":
            taken.append(choice)
            changed = section.model_copy(update={name: choice.value})
            job = job.model_copy(update={sections[0]: changed}) if sections else changed
    return job, taken


def apply_settings(job: Job) -> None:
    """Set torch's switches for a resolved job."""
    fp32 = "ieee" if job.precision == "fp32" else "tf32"
    # Each by name: one that was set by itself before no longer follows the others.
    backends: Any = torch.backends
    for settings in (backends, backends.cuda.matmul, backends.cudnn, backends.cudnn.conv, backends.cudnn.rnn):
        settings.fp32_precision = fp32
    torch.backends.cudnn.benchmark = bool(job.speed.cudnn_benchmark)
    keep_compiled_code()
    if job.speed.keep_memory:
        _keep_freed_memory()


def _keep_freed_memory() -> None:
    """Tell glibc to keep what is freed.

    By default it maps every large tensor anew and unmaps it when it is freed, so that each step faults all its pages
    in again. Keeping them made a ResNet's step 1.09 times as fast on two cores (bench/results/demo_epoch.json).
    The numbers are those of <malloc.h>.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # a C library other than glibc
        return
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3
    mallopt(mmap_threshold, 1 << 30)
    mallopt(trim_threshold, (1 << 31) - 1)
    mallopt(top_pad, 64 << 20)
