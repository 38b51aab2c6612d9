"""Everything that a training needs before it starts: task, data, model, step. What is wrong is found here."""

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from hotloop.core.errors import InputError
from hotloop.core.job import Job
from hotloop.core.machine import Machine
from hotloop.core.units import count
from hotloop.data.arrays import ArrayDataset
from hotloop.data.dataset import Dataset
from hotloop.data.loader import LoaderSettings
from hotloop.data.random import batch_seed
from hotloop.storage.transport import require_storage
from hotloop.tasks.task import Task, Tensors, load_task
from hotloop.train.blocks import has_batch_norm, recompute_activations, repeated_blocks
from hotloop.train.compiler import Compiled
from hotloop.train.flops import Arithmetic, flops_per_sample, matrix_rate
from hotloop.train.optimizer import make_optimizer
from hotloop.train.outline import outline
from hotloop.train.padding import VALID
from hotloop.train.precision import keep_in_fp32, use_float8
from hotloop.train.preparation import Prepare, PreparedBeside, prepares_in_step
from hotloop.train.random_state import seed_everything
from hotloop.train.ranks import inner, spread
from hotloop.train.resolve import Choice, apply_settings, choose_background, choose_compile, choose_parallel, resolve
from hotloop.train.schedule import make_schedule, warm_up_steps
from hotloop.train.sharded import is_sharded
from hotloop.train.source import ArraySource
from hotloop.train.step import Step
from hotloop.train.step_input import Loss
from hotloop.train.step_settings import StepSettings
from hotloop.train.world import ALONE, DIVIDED, World, check_shardable, check_share


@dataclass(frozen=True)
class Ready:
    """A job whose task, data and model are there.

    Attributes:
        job: as resolved.
        choices: what "auto" stands for.
        train_source: batches to train on, if they need no workers.
        beside: what prepares batches beside the end of the step before, if that is not a part of the step.
    """

    job: Job
    choices: list[Choice]
    task: Task
    datasets: list[tuple[Dataset, LoaderSettings]]
    train_source: ArraySource | None
    step: Step
    arithmetic: Arithmetic
    beside: PreparedBeside | None


def resolved_job(job: Job, machine: Machine) -> tuple[Job, bool]:
    """The job with what "auto" stands for, and whether its data is read while it trains. Nothing stays on a GPU.

    Raises:
        InputError: as `prepare`.
    """
    ready = prepare(job, machine, lambda text: None)
    found = ready.job, not isinstance(ready.datasets[0][0], ArrayDataset)
    del ready
    gc.collect()
    torch.cuda.empty_cache()
    return found


def prepare(job: Job, machine: Machine, notify: Callable[[str], None], world: World = ALONE) -> Ready:
    """Resolve a job and make its parts.

    Args:
        notify: told, in a line each, what cannot be done as fast as it could be.
        world: the processes that train together; this one has its part of each batch.

    Raises:
        InputError: the job, its data or its model cannot be used.
    """
    require_storage(job)
    job, choices = resolve(job, replace(machine, cpus=max(1, machine.cpus // world.local_size)), world)
    apply_settings(job)
    seed_everything(job.seed)
    task = load_task(job)
    datasets = _datasets(job, task, world)
    train, settings = datasets[0]
    make = partial(_make_model, job, task, len(train), world.data_size)
    outlined = task.model_on_meta and world.size > 1 and job.parallel in ("auto", *DIVIDED)
    model = make(outline(task) if outlined else task.model())
    flops = flops_per_sample(task, train, job.seed)
    job, more = choose_compile(job, count_steps(job, len(train)), flops * job.data.batch_size * job.train.accumulate)
    device = torch.device(job.device)
    job, last = choose_parallel(job, model, world)
    job, saves = choose_background(job, model, machine, world)
    divided = world.size > 1 and job.parallel in DIVIDED
    if divided:
        check_shardable(job)
        for weight in model.parameters():  # those without gaps only can be divided
            weight.data = weight.data.contiguous()
        job = job.model_copy(update={"speed": job.speed.model_copy(update={"channels_last": False})})
    else:
        model = make(task.model()) if outlined else model
        _place(job, model)
    # After the model: whether it keeps its arrays on the GPU depends on the room that is left there.
    source = ArraySource(train, settings, device, task.random_numbers) if isinstance(train, ArrayDataset) else None
    model = spread(model, world, job, lambda: make(task.model()))
    # What each rank draws from here on, dropout say, is its own; an outline's numbers were drawn by the first alone.
    if world.data_rank or (outlined and divided):
        seed_everything(batch_seed(job.seed, 0, world.data_rank))
    preparation = _preparation(job, task, source, notify) if prepares_in_step(task) else None
    apart = preparation if _prepares_beside(job, task, world) else None
    step = _make_step(job, task, model, None if apart else preparation, len(train), notify, world)
    beside = PreparedBeside(apart, device, step.executor, bool(job.speed.compile), notify) if apart else None
    arithmetic = Arithmetic(flops, matrix_rate(device, job.precision) * world.size)
    return Ready(job, [*choices, *more, *last, *saves], task, datasets, source, step, arithmetic, beside)


def _datasets(job: Job, task: Task, world: World) -> list[tuple[Dataset, LoaderSettings]]:
    train, val = task.data("train"), task.data("val")
    if train is None:
        raise InputError("the task has no training data", 'its data("train") gave None', "return a hotloop.Dataset")
    for name, dataset in (("train", train), ("val", val)):
        if dataset is not None and len(dataset) == 0:
            raise InputError(f'the data set of "{name}" has 0 samples', "there is nothing to read", "name other data")
    check_share(job, world.data_size)
    if job.data.batch_size > len(train):
        fewer = f" --set ranks.processes={len(train) * world.tensor}" if len(train) < world.data_size else ""
        raise InputError(
            f"data.batch_size = {job.data.batch_size} is more than the {len(train)} samples of {job.data.train}",
            "not one batch could be filled",
            f"--set data.batch_size={len(train)}{fewer}",
        )
    on_damaged = job.data.on_corrupt
    part, drop = (world.data_rank, world.data_size), job.data.last_batch == "drop"
    settings = LoaderSettings(job.data.batch_size, job.seed, True, drop, on_damaged, *part)
    datasets = [(train, settings)]
    if val is not None:
        on_damaged_val = "drop" if on_damaged == "replace" else on_damaged
        size = min(int(job.data.val_batch_size), len(val))
        datasets.append((val, LoaderSettings(size, job.seed, False, False, on_damaged_val, *part)))
    return datasets


def _make_model(job: Job, task: Task, samples: int, ranks: int, model: nn.Module) -> nn.Module:
    """What the job makes of a task's model."""
    if any(isinstance(module, nn.DataParallel) for module in model.modules()):
        raise InputError(
            "the task's model is a torch.nn.DataParallel",
            "it copies the model to all GPUs in every step, from one process",
            "return the model without it: hotloop trains on each GPU by a process of its own (docs/several-gpus.md)",
        )
    check_last_batch(job, task, model, samples, ranks)
    if job.precision == "float8":
        use_float8(model)
    if job.speed.activations != "keep":
        recompute_activations(model, job.speed.activations)
    return model


def _place(job: Job, model: nn.Module) -> None:
    """Onto the device, as one that has all of it."""
    volumes = any(parameter.ndim == 5 for parameter in model.parameters())  # channels_last is for four dimensions
    layout = torch.channels_last if job.speed.channels_last and not volumes else torch.contiguous_format
    model.to(device=job.device, memory_format=layout)  # type: ignore[call-overload]
    keep_in_fp32(model, job.model.keep_fp32)


def check_last_batch(job: Job, task: Task, model: nn.Module, samples: int, ranks: int) -> None:
    """Raise InputError if so many ranks cannot train on a short last batch as it is, or as the job has it padded."""
    normalised, size = has_batch_norm(model), job.data.batch_size
    last = samples % size
    if job.data.last_batch == "keep" and last and last // ranks <= 1 and normalised:
        shared = f", shared by {ranks} processes" if ranks > 1 else ""
        raise InputError(
            f"the last batch of {samples} samples in batches of {size} has {count(last, 'sample')}{shared}",
            "batch normalisation cannot normalise over one",
            "--set data.last_batch=drop",
        )
    if job.data.last_batch == "pad":
        cause = "batch normalisation would count the blank samples" if normalised else task.padding_obstacle
        if cause:
            raise InputError(
                'data.last_batch = "pad" would change what is trained', cause, "--set data.last_batch=drop"
            )


def _make_step(
    job: Job, task: Task, model: nn.Module, prepare: Prepare | None, samples: int, notify: Callable[[str], None],
    world: World,
) -> Step:  # fmt: skip
    pad_to = -(-job.data.batch_size // world.data_size)  # what a rank has of a batch, at most
    optimizer = task.optimizer(inner(model)) or make_optimizer(job.optimizer, model)
    steps = count_steps(job, samples)
    per_epoch = steps // job.train.epochs
    schedule = make_schedule(job.schedule, steps, per_epoch)
    if (warmup := warm_up_steps(job.schedule, steps, per_epoch)) > steps and world.first:
        reached = f"the learning rate reaches {100 * schedule(steps - 1):.2g} % of the highest"
        notify(f"schedule.warmup takes {count(warmup, 'step')}, the whole run {count(steps, 'step')}: {reached}")
    settings = StepSettings(
        precision=job.precision,
        clip_norm=job.train.clip_norm,
        ema=job.train.ema,
        compile=_compiled(job, model, notify if world.first else lambda text: None),
        own_kernels=bool(job.speed.kernels) and not is_sharded(model),
        graph=bool(job.speed.graph),
        recover=job.speed.recover,
        pad_to=pad_to if job.data.last_batch == "pad" else 0,
        compress=job.ranks.gradients == "bf16",
    )
    return Step(model, _make_loss(job, task, prepare, notify), optimizer, schedule, settings, notify)


def _compiled(job: Job, model: nn.Module, notify: Callable[[str], None]) -> str:
    if job.speed.compile and is_sharded(model):  # weights are gathered between blocks
        if repeated_blocks(model):
            return "blocks"
        notify("the model is not compiled: its weights are divided, and it has no repeated blocks")
        return ""
    return {True: "model", False: "", "blocks": "blocks"}[job.speed.compile]


def _preparation(job: Job, task: Task, source: ArraySource | None, notify: Callable[[str], None]) -> Prepare:
    """What the task does with a batch that has arrived, compiled as the model is."""

    def ready(batch: Tensors) -> Tensors:
        return task.prepare(source.expand(batch) if source else batch, training=True)

    return Compiled(ready, "the preparation of batches", notify) if job.speed.compile else ready


def _prepares_beside(job: Job, task: Task, world: World) -> bool:
    """Where ranks average gradients after backward, as a rule, and once for each batch."""
    captured = job.device == "cuda" and bool(job.speed.graph)
    averages_after = captured and world.size > 1 and job.parallel == "ddp" and not job.ranks.static_graph
    once = job.train.accumulate == 1 and job.data.last_batch != "pad"
    return averages_after and once and task.prepare_is_apart


def _make_loss(job: Job, task: Task, prepare: Prepare | None, notify: Callable[[str], None]) -> Loss:
    """From a batch to its loss; what is not the model's own part is compiled as the model is.

    Args:
        prepare: what is done with the batch first; None: nothing.
    """
    padded, device = job.data.last_batch == "pad", job.device
    loss_of = Compiled(task.loss, "the loss", notify) if job.speed.compile else task.loss

    def loss(model: nn.Module, batch: Tensors) -> Tensor:
        valid = batch[VALID] if padded else None
        if padded:
            batch = {name: tensor for name, tensor in batch.items() if name != VALID}
        if prepare:
            with torch.autocast(device, enabled=False):  # positions in bf16 are off by 0.2 of 224 pixels
                batch = prepare(batch)
        if valid is not None:
            batch = task.ignore(batch, valid)
        value: Tensor = loss_of(task.forward(model, batch), batch)
        return value

    return loss


def count_steps(job: Job, samples: int) -> int:
    """Optimizer steps of a whole run over so many samples an epoch."""
    batches = LoaderSettings(job.data.batch_size, drop_last=job.data.last_batch == "drop").batches(samples)
    return job.train.epochs * -(-batches // job.train.accumulate)


def count_parameters(model: nn.Module) -> int:
    """Trainable parameters."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
