"""From a job to its result: everything around the loop."""

import errno
import hashlib
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hotloop.core.errors import HotloopError, InputError, cannot_write
from hotloop.core.job import Job
from hotloop.core.machine import Machine
from hotloop.core.run import Result, Run, Status, open_run
from hotloop.core.units import count
from hotloop.data.dataset import Dataset
from hotloop.data.loader import Loaders, LoaderSettings
from hotloop.pages.run import write_report
from hotloop.tasks.task import Task, Tensors, load_task
from hotloop.train.checkpoint import Checkpointer, Loaded, named_checkpoint
from hotloop.train.examples import write_examples
from hotloop.train.loop import Loop, Parts
from hotloop.train.observer import Ended, Observer, Observers, Started, Warned
from hotloop.train.optimizer import make_optimizer
from hotloop.train.preemption import Preemption
from hotloop.train.progress import Progress
from hotloop.train.random_state import restore_random_state, seed_everything
from hotloop.train.record import MetricsFile, TensorBoard
from hotloop.train.resolve import apply_settings, resolve
from hotloop.train.resume import changed_settings, check_identity, identity, restore, set_aside
from hotloop.train.schedule import make_schedule
from hotloop.train.step import Step, StepSettings


def train_job(
    job: Job, machine: Machine, observer: Observer, resume: str = "auto", now: datetime | None = None
) -> tuple[Run, Result]:
    """Train what a job asks for.

    What can be wrong with the job, its data or its model is found before the run's directory is made. SIGTERM and a
    first SIGINT save at the next step and end with the status "preempted".

    Args:
        machine: what may be used.
        observer: told what happens; closed at the end.
        resume: "auto" continues the run in `run.dir` if there is one; "never" sets that one aside and starts anew; a
            path continues a checkpoint or a run.
        now: names a new run; the current time without it.

    Returns:
        The run and its result, "finished" or "preempted".

    Raises:
        InputError: the job, its data or its model cannot be used, or the checkpoint is of something else.
        HotloopError: the training failed; the run's result says so too.
    """
    with ExitStack() as stack:
        stack.callback(observer.close)
        preemption = stack.enter_context(Preemption())
        ready = _prepare(job, machine)
        named = named_checkpoint(Path(resume)) if resume not in ("auto", "never") else None
        if resume == "never" and job.run.dir and (aside := set_aside(Path(job.run.dir))):
            observer.on(Warned(f"the earlier run is now {aside}"))
        loaders = stack.enter_context(Loaders(ready.datasets, int(ready.job.data.workers)))
        run = open_run(ready.job, now or datetime.now())
        stack.enter_context(run.locked())
        recorders = [MetricsFile(run), *([TensorBoard(run)] if job.log.tensorboard else [])]
        for recorder in recorders:
            stack.callback(recorder.close)
        parts = Parts(
            job=ready.job,
            run=run,
            task=ready.task,
            step=ready.step,
            train_loader=loaders[0],
            val_loader=loaders[1] if len(loaders) > 1 else None,
            observer=Observers([*recorders, observer]),
            preemption=preemption,
            identity=identity(ready.job, ready.step.model, ready.datasets[0][0]),
        )
        return run, _Training(parts, machine).run(named)


def inspect_job(job: Job, machine: Machine) -> dict[str, Any]:
    """What a job would train, found by preparing all of it but starting nothing.

    Raises:
        InputError: as `train_job`.
    """
    ready = _prepare(job, machine)
    sizes = [len(dataset) for dataset, _ in ready.datasets]
    return {
        "model": ready.job.model.name,
        "parameters": _parameters(ready.step.model),
        "train_samples": sizes[0],
        "val_samples": sizes[1] if len(sizes) > 1 else 0,
        "steps": _steps(ready.job, sizes[0]),
        "device": ready.job.device,
        "precision": ready.job.precision,
        "workers": ready.job.data.workers,
    }


@dataclass(frozen=True)
class _Ready:
    """A job whose task, data and model are there."""

    job: Job
    task: Task
    datasets: list[tuple[Dataset, LoaderSettings]]
    step: Step


def _prepare(job: Job, machine: Machine) -> _Ready:
    job = resolve(job, machine)
    apply_settings(job)
    seed_everything(job.seed)
    task = load_task(job)
    datasets = _datasets(job, task)
    return _Ready(job, task, datasets, _make_step(job, task, len(datasets[0][0])))


@dataclass(frozen=True)
class _Training:
    """One run in its directory."""

    parts: Parts
    machine: Machine

    def run(self, named: Loaded | None) -> Result:
        """Resume if there is something to resume, train, and leave result and report however it ends."""
        parts = self.parts
        checkpointer = Checkpointer(parts.run.checkpoints, warn=lambda text: parts.observer.on(Warned(text)))
        loaded = named or checkpointer.latest()
        if loaded:
            check_identity(loaded, parts.identity)
        if named:
            checkpointer.abandon_after(named.path.name)
        progress = restore(loaded, parts.step) if loaded else Progress()
        before = parts.run.result()
        if before and before.status == "finished" and progress.epoch >= parts.job.train.epochs:
            epochs = count(progress.epoch, "epoch")
            parts.observer.on(Warned(f"{parts.run.directory} has finished its {epochs}; more: --set train.epochs=N"))
            return before
        loop = Loop(parts, progress)
        resumed_from = str(loaded.path) if loaded else ""
        try:
            parts.run.write_start(parts.job, self.machine)
            parts.observer.on(self._started(progress, loaded))
            if loaded:
                restore_random_state(loaded.state["random"])
            finished = loop.run()
        except Exception as error:
            failure = self._failure(error)
            self._end(self._result(loop.progress, "failed", resumed_from, error=str(failure)), loop)
            raise failure from error
        result = self._result(loop.progress, "finished" if finished else "preempted", resumed_from)
        self._end(result, loop)
        return result

    def _started(self, progress: Progress, loaded: Loaded | None) -> Started:
        parts = self.parts
        return Started(
            run=parts.run,
            job=parts.job,
            steps=_steps(parts.job, len(parts.train_loader.dataset)),
            samples=len(parts.train_loader.dataset),
            parameters=_parameters(parts.step.model),
            resumed_from=str(loaded.path) if loaded else "",
            changed=changed_settings(loaded, parts.job) if loaded else [],
            progress=progress,
        )

    def _result(self, progress: Progress, status: Status, resumed_from: str, error: str = "") -> Result:
        return Result(
            status=status,
            name=self.parts.run.name,
            metrics=progress.metrics,
            epochs=progress.epoch,
            steps=progress.step,
            samples_per_second=progress.whole.samples_per_second,
            data_wait_share=progress.whole.data_wait_share,
            train_seconds=progress.whole.seconds,
            weights_sha256=weights_sha256(self.parts.step.model) if status == "finished" else "",
            corrupt_files=[{"path": name, "reason": why} for name, why in sorted(progress.damages.items())],
            precision=self.parts.job.precision,
            device=self.parts.job.device,
            parameters=_parameters(self.parts.step.model),
            resumed_from=resumed_from,
            error=error,
        )

    def _failure(self, error: Exception) -> Exception:
        """A failed write in words; other errors as they are."""
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO):
            return cannot_write(self.parts.run.directory, error, HotloopError)
        return error

    def _end(self, result: Result, loop: Loop) -> None:
        """Leave result and report; a disk that is full must not hide why the run ended."""
        try:
            self.parts.run.write_result(result)
            if loop.examples:
                write_examples(self.parts.run, loop.examples)
            write_report(self.parts.run)
        except OSError as error:
            self.parts.observer.on(Warned(f"result or report could not be written: {error}"))
        self.parts.observer.on(Ended(self.parts.run, result))


def weights_sha256(model: nn.Module) -> str:
    """Hash over names, shapes, types and bytes of a model's state, in order of name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _datasets(job: Job, task: Task) -> list[tuple[Dataset, LoaderSettings]]:
    train, val = task.data("train"), task.data("val")
    if train is None:
        raise InputError("the task has no training data", 'its data("train") gave None', "return a hotloop.Dataset")
    for name, dataset in (("train", train), ("val", val)):
        if dataset is not None and len(dataset) == 0:
            raise InputError(f'the data set of "{name}" has 0 samples', "there is nothing to read", "name other data")
    if job.data.batch_size > len(train):
        raise InputError(
            f"data.batch_size = {job.data.batch_size} is more than the {len(train)} samples of {job.data.train}",
            "not one batch could be filled",
            f"--set data.batch_size={len(train)}",
        )
    on_damaged = job.data.on_corrupt
    settings = LoaderSettings(job.data.batch_size, job.seed, True, job.data.drop_last, on_damaged)
    datasets = [(train, settings)]
    if val is not None:
        on_damaged_val = "drop" if on_damaged == "replace" else on_damaged
        size = min(int(job.data.val_batch_size), len(val))
        datasets.append((val, LoaderSettings(size, job.seed, False, False, on_damaged_val)))
    return datasets


def _make_step(job: Job, task: Task, samples: int) -> Step:
    model = task.model()
    if samples % job.data.batch_size == 1 and not job.data.drop_last and _has_batch_norm(model):
        raise InputError(
            f"the last batch of {samples} samples in batches of {job.data.batch_size} has 1 sample",
            "batch normalisation cannot normalise over one",
            "--set data.drop_last=true",
        )
    volumes = any(parameter.ndim == 5 for parameter in model.parameters())  # channels_last is for four dimensions
    layout = torch.channels_last if job.speed.channels_last and not volumes else torch.contiguous_format
    model = model.to(device=job.device, memory_format=layout)  # type: ignore[call-overload]
    optimizer = task.optimizer(model) or make_optimizer(job.optimizer, model)
    if job.speed.compile:
        model.compile()
    steps = _steps(job, samples)
    schedule = make_schedule(job.schedule, steps, steps // job.train.epochs)
    settings = StepSettings(job.precision, job.train.clip_norm, job.train.ema)

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        return task.loss(task.forward(model, batch), batch)

    return Step(model, loss, optimizer, schedule, settings)


def _steps(job: Job, samples: int) -> int:
    batches = samples // job.data.batch_size if job.data.drop_last else -(-samples // job.data.batch_size)
    return job.train.epochs * -(-batches // job.train.accumulate)


def _has_batch_norm(model: nn.Module) -> bool:
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
