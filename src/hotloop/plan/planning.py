"""A job's plan: what it needs, how long it takes, where, for how much."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from hotloop.core.errors import HotloopError, InputError
from hotloop.core.job import TASKS, Job
from hotloop.core.own_lines import own_line
from hotloop.data.arrays import ArrayDataset
from hotloop.data.dataset import Dataset
from hotloop.data.images import ImageFiles
from hotloop.data.loader import batches_ahead
from hotloop.doctor.expect import decode_rate
from hotloop.plan.cards import Card, cards, table
from hotloop.plan.footprint import Footprint, State
from hotloop.plan.one_step import SAMPLES, OneStep
from hotloop.plan.options import Option, Setup, Workload, largest_batch, priced, setup_for
from hotloop.plan.prices import Offer
from hotloop.plan.trace import Tracer
from hotloop.plan.ways import Ways
from hotloop.tasks.task import Task, load_task
from hotloop.train.blocks import has_batch_norm, repeated_blocks
from hotloop.train.flops import flops_per_sample
from hotloop.train.prepare import count_steps
from hotloop.train.random_state import drawn_from
from hotloop.train.resolve import COMPILE_FROM_SECONDS, eager_seconds

_COUNTS = (1, 2, 4, 8)
_LEAST_SAVE_SECONDS = 0.1
_LOOKED_AT = 50


@dataclass(frozen=True)
class Request:
    """What is asked beside the job.

    Attributes:
        card: whose memory and time are told first; `gpus` of them.
        samples: of an epoch; 0: those of the data set.
        offers: instances to choose among.
        every_way: other precisions, activations and divisions are traced too, some seconds each.
    """

    card: Card
    gpus: int = 1
    samples: int = 0
    offers: tuple[Offer, ...] = ()
    every_way: bool = False


@dataclass(frozen=True)
class Needs:
    """What a machine needs beside its GPUs.

    Attributes:
        samples_per_second: that have to be read.
        cpus: to decode as fast; 0: nothing is decoded.
        read_bytes_per_second: from the disk or the network; None where the files' sizes are not known.
        checkpoint_bytes: of each one.
        host_bytes: of memory: batches ahead, and a checkpoint that is written.
    """

    samples_per_second: float
    cpus: int
    read_bytes_per_second: float | None
    checkpoint_bytes: float
    host_bytes: float


@dataclass(frozen=True)
class Plan:
    """What is found.

    Attributes:
        parameters: of the model.
        steps: of the whole training, on any number of GPUs.
        asked: for the card that was named; largest_batch: of one of its GPUs that fits.
        ways: others for that card: with recomputation, other precisions, more GPUs.
        options: for all instances, not sorted.
        untraced: why the model could not be traced, so that all is of a step of few samples that was made here.
    """

    parameters: int
    samples: int
    steps: int
    epochs: int
    compiled: bool
    flops_per_step: float
    asked: Option
    largest_batch: int
    ways: tuple[Setup, ...]
    options: tuple[Option, ...]
    needs: Needs
    untraced: str = ""


def plan_job(
    job: Job, request: Request, notify: Callable[[str], None], measure: Callable[[Job], float] | None = None
) -> Plan:
    """Plan a job. 3 to 10 s on two cores; no GPU is used, and no weights are made but for what cannot be traced.

    Args:
        notify: told what is begun, once job and data are known to be usable.
        measure: gives the seconds of a step on this machine's GPUs, which are of the card that is asked.

    Raises:
        InputError: the job, its data or its model cannot be used.
    """
    task = load_task(job.model_copy(update={"device": "cpu"}))
    dataset = _data(task)
    steps = _steps(job, request.samples or len(dataset), request)
    work, ways = _workload(job, task, dataset, steps)
    notify(f"tracing {job.model.name} ...")
    try:
        return _planned(work, ways, request, dataset, measure)
    except HotloopError:
        raise
    except Exception as error:
        untraced = _reason(error)
    notify(f"it cannot be traced ({untraced}); making a step of {SAMPLES} samples ...")
    try:
        made = Ways(OneStep(job, task, dataset), ways.least)
        return replace(_planned(replace(work, compiled=False), made, request, dataset, measure), untraced=untraced)
    except HotloopError:
        raise
    except Exception as error:
        raise _cannot_plan(error, job) from error


def _planned(
    work: Workload, ways: Ways, request: Request, dataset: Dataset, measure: Callable[[Job], float] | None
) -> Plan:
    """Raises what tracing does."""
    job = work.job
    if measure:
        predicted = setup_for(work, ways, request.card, request.gpus).time.seconds
        work = replace(work, scale=measure(job) / predicted, source="measured")
    asked = setup_for(work, ways, request.card, request.gpus)
    most = largest_batch(work, ways, asked)
    options = tuple(_options(work, ways, request.offers))
    others = tuple({one.key: one for one in _others(work, ways, request) if one.key != asked.key}.values())
    footprint = ways.footprint(asked.way)
    chosen = [offer for offer in request.offers if (offer.card, offer.gpus) == (request.card.key, request.gpus)]
    here = priced(work, asked, chosen[0] if chosen else None)
    flops = footprint.flops / footprint.batch * job.data.batch_size * job.train.accumulate
    return Plan(
        ways.state.parameters, request.samples or len(dataset), work.steps, job.train.epochs, work.compiled, flops,
        here, most, others, options, _needs(job, dataset, ways.state, footprint, asked),
    )  # fmt: skip


def _data(task: Task) -> Dataset:
    dataset = task.data("train")
    if dataset is None or not len(dataset):
        raise InputError(
            "the task has no training data", "its samples say what a batch is", "name a few samples at least"
        )
    return dataset


def _steps(job: Job, samples: int, request: Request) -> int:
    """Of the whole training.

    Raises:
        InputError: they cannot be made so.
    """
    card = request.card
    if job.precision not in ("auto", *card.precisions):
        raise InputError(
            f'precision = "{job.precision}" on {card.key}', f"it has {', '.join(card.precisions)}",
            "--set precision=auto, or another --card",
        )  # fmt: skip
    if job.data.batch_size > samples:
        raise InputError(
            f"data.batch_size = {job.data.batch_size} is more than {samples} samples", "not one batch could be filled",
            "--samples N, as many as there will be",
        )  # fmt: skip
    return count_steps(job, samples)


def _workload(job: Job, task: Task, dataset: Dataset, steps: int) -> tuple[Workload, Ways]:
    compiled = bool(job.speed.compile)
    if job.speed.compile == "auto" and eager_seconds(steps, 0.0) < COMPILE_FROM_SECONDS:
        flops = flops_per_sample(task, dataset, job.seed) * job.data.batch_size * job.train.accumulate
        compiled = eager_seconds(steps, flops) >= COMPILE_FROM_SECONDS
    with drawn_from(job.seed), torch.device("meta"):
        model = task.model()
    blocks, least = repeated_blocks(model), 2 if has_batch_norm(model) else 1  # one sample cannot be normalised
    arrays = float(dataset.size_bytes) if isinstance(dataset, ArrayDataset) else 0.0
    recomputes = bool(blocks) and not any(has_batch_norm(block) for block in blocks)
    return Workload(job, model, steps, recomputes, compiled, arrays), Ways(Tracer(job, task, dataset), least)


def _others(work: Workload, ways: Ways, request: Request) -> Iterator[Setup]:
    """Other numbers of GPUs; and if all are asked for, other activations, precisions and divisions."""
    card, job = request.card, work.job
    for gpus in _COUNTS:
        yield from _possible(work, ways, card, gpus)
    if not request.every_way:
        return
    for activations in ("selective", "blocks") if work.recomputes else ():
        speed = job.speed.model_copy(update={"activations": activations})
        yield from _possible(replace(work, job=job.model_copy(update={"speed": speed})), ways, card, request.gpus)
    for precision in card.precisions:
        changed = replace(work, job=job.model_copy(update={"precision": precision}))
        yield from _possible(changed, ways, card, request.gpus)
    for gpus in _COUNTS[1:]:
        for parallel in ("ddp", "fsdp"):
            changed = replace(work, job=job.model_copy(update={"parallel": parallel}))
            yield from _possible(changed, ways, card, gpus)


def _possible(work: Workload, ways: Ways, card: Card, gpus: int) -> list[Setup]:
    """How to train so; none where `train` refuses the job."""
    try:
        return [setup_for(work, ways, card, gpus)]
    except InputError:
        return []


def _options(work: Workload, ways: Ways, offers: Sequence[Offer]) -> Iterator[Option]:
    """All instances that have what the job asks for."""
    for offer in offers:
        card = cards()[offer.card]
        if work.job.precision in ("auto", *card.precisions):
            yield from (priced(work, setup, offer) for setup in _possible(work, ways, card, offer.gpus))


def _needs(job: Job, dataset: Dataset, state: State, footprint: Footprint, setup: Setup) -> Needs:
    rate = job.data.batch_size * job.train.accumulate / setup.time.seconds
    files = isinstance(dataset, ImageFiles)
    size = _sample_bytes(dataset) if isinstance(dataset, ImageFiles) else None
    model = state.parameter_bytes + state.saved_buffer_bytes
    checkpoint = model * (1 + (job.train.ema > 0)) + state.optimizer_bytes
    part, parts = footprint.batch_bytes / footprint.batch * setup.batch, -(-job.data.batch_size // setup.batch)
    return Needs(
        samples_per_second=rate,
        cpus=math.ceil(rate / decode_rate()) if files else 0,
        read_bytes_per_second=size * rate if size else None,
        checkpoint_bytes=checkpoint,
        host_bytes=checkpoint + (1 + batches_ahead(part, parts)) * part * setup.gpus,
    )


def _sample_bytes(dataset: ImageFiles) -> float | None:
    """Of a file on average, by some of them; None if they are not files of their own here."""
    images = dataset.images
    if images.remote or images.spans:
        return None
    numbers = range(0, len(images), max(1, len(images) // _LOOKED_AT))
    sizes = [Path(images.path(number)).stat().st_size for number in numbers]
    return sum(sizes) / len(sizes)


def _reason(error: Exception) -> str:
    """Which operation stands in the way of tracing, and where."""
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        return f"{error.func} gives what depends on the numbers themselves{own_line(error)}"
    return _told(error)


def _cannot_plan(error: Exception, job: Job) -> InputError:
    name = job.model.name if job.task.name in TASKS else job.task.name
    return InputError(
        f"a step of {name} can neither be traced nor made here", _told(error),
        "hotloop train --dry-run with the same job, or mend it",
    )  # fmt: skip


def _told(error: Exception) -> str:
    message = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {message}{own_line(error)}"


def save_seconds(needs: Needs, setup: Setup) -> float:
    """For which training waits while a checkpoint is copied to the host's memory, at what PCIe carries.

    Each rank copies its part where weights are divided; otherwise the first one all of it.
    """
    part = needs.checkpoint_bytes / (setup.gpus if setup.way.divided else 1)
    rate: float = 1e9 * table()["reached"]["pcie"]
    return max(_LEAST_SAVE_SECONDS, part / rate)
