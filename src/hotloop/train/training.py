"""From a job to its result: everything around the loop."""

import errno
import hashlib
import os
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path

import torch
from torch import nn

from hotloop.core.errors import CheckpointError, HotloopError, cannot_write
from hotloop.core.job import Job
from hotloop.core.machine import Machine
from hotloop.core.run import LAUNCHED, Result, Run, Status, open_run
from hotloop.core.units import count
from hotloop.data.arrays import ArrayDataset
from hotloop.data.loader import Loaders
from hotloop.pages.run import write_report
from hotloop.train.card_errors import card_errors
from hotloop.train.checkpoint.checkpointer import Loaded
from hotloop.train.checkpoint.parts import StoredTensor
from hotloop.train.copying import wait_for_copies
from hotloop.train.data_meter import DataSpeed
from hotloop.train.decoders import open_decoding
from hotloop.train.decoding import Decoding
from hotloop.train.examples import write_examples
from hotloop.train.heartbeat import Heart
from hotloop.train.host_memory import not_locked, page_locked
from hotloop.train.live import Published, publisher_of_rank
from hotloop.train.loop import Loop, Parts
from hotloop.train.observer import Ended, Observer, Observers, Started
from hotloop.train.own_watch import OwnWatch
from hotloop.train.patience import Patience, StopRequested, WorkerDeaths
from hotloop.train.preemption import Preemption
from hotloop.train.preparation import Preparation, PreparedByDraws, prepares_in_step
from hotloop.train.prepare import Ready, count_parameters, count_steps, prepare
from hotloop.train.progress import Progress
from hotloop.train.random_state import restore_random_state
from hotloop.train.ranks import inner
from hotloop.train.record import MetricsFile, TensorBoard
from hotloop.train.resolve import Choice, decided
from hotloop.train.resume import changed_settings, identity, restore
from hotloop.train.resume_point import find, gone, hash_of_command, is_own, looked_up, open_copies, started_again
from hotloop.train.sharded import whole
from hotloop.train.source import ArraySource, LoaderSource, Source
from hotloop.train.world import ALONE, FAILED, RESUMED, World, in_teams, peer_lost


def train_job(
    job: Job, machine: Machine, observer: Observer, resume: str = "auto", now: datetime | None = None,
    world: World = ALONE, stop_file: str = "", last: bool = False,
) -> tuple[Run, Result]:  # fmt: skip
    """Train what a job asks for.

    What can be wrong with the job, its data or its model is found before the run's directory is made. SIGTERM and a
    first SIGINT save at the next step and end with the status "preempted".

    Args:
        machine: what may be used.
        observer: told what happens; closed at the end.
        resume: "auto" continues the run in `run.dir` if there is one; "never" sets that one aside and starts anew; a
            path continues a checkpoint or a run.
        now: names a new run; the current time without it.
        world: the processes that train together; each calls this with the same job, and the first one writes the run.
        stop_file: of what has launched the run: once it exists, the run saves and stops, as what it holds asks.
        last: the process only ends after this, with its code; later signals are ignored, a step that hangs is ended.

    Returns:
        The run and its result, "finished" or "preempted".

    Raises:
        InputError: the job, its data or its model cannot be used, or the checkpoint is of something else.
        HotloopError: the training failed; the run's result says so too.
    """
    with closing(observer), ExitStack() as stack:
        heart = _watched_heart(job, world, stack, last)
        command_hash = hash_of_command(job, resume)
        job, resume = started_again(job, resume, world, observer.warn)
        world = in_teams(world, job)
        preemption = stack.enter_context(_preemption(job, observer, world, stop_file, last))
        ready = prepare(job, machine, observer.warn, world)
        named = looked_up(job, resume, observer.warn, heart)
        patience = Patience(lambda: bool(preemption.requested), observer.warn, alone=world.size == 1)
        stack.enter_context(card_errors(next(ready.step.model.parameters()).device, observer.warn))
        ready, decoding = _with_decoder(ready, stack, observer.warn)
        deaths = WorkerDeaths(observer.warn)
        train, val = _sources(ready, decoding, stack, patience, deaths, observer.warn)
        run = _opened(ready.job, now or datetime.now(), world)
        recorders = _recorders(job, run, stack, observer.warn) if world.first else []
        recorders.append(_published(run, ready.job, heart, stack))
        parts = Parts(
            job=ready.job,
            run=run,
            task=ready.task,
            step=ready.step,
            train=train,
            val=val,
            observer=Observers([*recorders, observer], waiting=heart.working),
            preemption=preemption,
            identity=identity(ready.job, inner(ready.step.model), ready.datasets[0][0]),
            arithmetic=ready.arithmetic,
            deaths=deaths,
            world=world,
            heart=heart,
            copies=open_copies(job, run, resume, stack) if world.first else None,
            preparation=_preparation(ready, train, world),
        )
        return run, _Training(parts, machine, ready.choices, command_hash).run(named)


def _watched_heart(job: Job, world: World, stack: ExitStack, last: bool) -> Heart:
    heart = stack.enter_context(Heart(world))
    if not world.folder:  # no process of ours looks after this one
        stack.enter_context(OwnWatch(heart, job.ranks.timeout.amount, ends=last))
    return heart


def _preparation(ready: Ready, train: Source, world: World) -> Preparation:
    task = ready.task
    if ready.beside or prepares_in_step(task):
        return ready.beside or Preparation()
    return PreparedByDraws(
        lambda batch: task.prepare(train.expand(batch), training=True), ready.job.seed, world.data_rank
    )


def _preemption(job: Job, observer: Observer, world: World, stop_file: str, last: bool) -> Preemption:
    asked = job.preemption
    return Preemption(asked.cloud, asked.address, asked.file, asked.every, observer.warn, world.folder, stop_file, last)


_LOCK_SECONDS = 150.0
"""What an engine starts again may find the lock of a machine that is gone, on a network disk."""


def _opened(job: Job, now: datetime, world: World) -> Run:
    """The run that the first rank has opened; a restart of these ranks finds it."""
    run = Run(world.from_first(open_run(job, now).directory if world.first else Path()))
    world.note("run", str(run.directory))
    return run


def _recorders(job: Job, run: Run, stack: ExitStack, notify: Callable[[str], None]) -> list[Observer]:
    """What writes the run down; nobody else writes there meanwhile."""
    stack.enter_context(run.locked(_LOCK_SECONDS if os.environ.get(LAUNCHED) else 0.0))
    if not job.log.tensorboard:
        return [MetricsFile(run)]
    events = TensorBoard(run)

    def close() -> None:
        """What it still has to write must not hide why the run ended."""
        try:
            events.close()
        except OSError as error:
            notify(f"TensorBoard's events are not complete: {error}")

    stack.callback(close)
    return [MetricsFile(run), events]


def _published(run: Run, job: Job, heart: Heart, stack: ExitStack) -> Observer:
    """Tells whoever watches the machine."""
    publisher = publisher_of_rank(job.name, run, torch.device(job.device), heart.world)
    stack.callback(publisher.close)
    heart.publish(publisher)
    return Published(publisher)


def _with_decoder(ready: Ready, stack: ExitStack, notify: Callable[[str], None]) -> tuple[Ready, Decoding | None]:
    """What finishes the training's images besides the workers, if anything does. Validation is left to the workers."""
    decoding, choice = open_decoding(ready.job, *ready.datasets[0], notify)
    if decoding:
        stack.callback(decoding.close)
    _, taken = decided(ready.job, [choice])
    data = ready.job.data.model_copy(update={"decode": choice.value})  # what is done, also where more was asked for
    return replace(ready, job=ready.job.model_copy(update={"data": data}), choices=[*ready.choices, *taken]), decoding


def _sources(
    ready: Ready, decoding: Decoding | None, stack: ExitStack, patience: Patience, deaths: WorkerDeaths,
    notify: Callable[[str], None],
) -> tuple[Source, Source | None]:  # fmt: skip
    """Batches to train and validate on; workers only for what has to be read."""
    device = torch.device(ready.job.device)
    read = [pair for pair in ready.datasets if not isinstance(pair[0], ArrayDataset)]
    loaders = {}
    if read:
        opened = stack.enter_context(Loaders(read, int(ready.job.data.workers), patience, on_death=deaths))
        loaders = {id(loader.dataset): loader for loader in opened}
        if device.type == "cuda":
            refused = [why for loader in opened if (why := stack.enter_context(page_locked(loader.memory)))]
            if refused:
                notify(not_locked("batches", refused[0]))
    train = ready.train_source or LoaderSource(
        loaders[id(ready.datasets[0][0])], device, ready.task.random_numbers, decoding
    )
    if len(ready.datasets) == 1:
        return train, None
    data, settings = ready.datasets[1]
    if isinstance(data, ArrayDataset):
        return train, ArraySource(data, settings, device)
    return train, LoaderSource(loaders[id(data)], device)


@dataclass(frozen=True)
class _Training:
    """One run in its directory.

    Attributes:
        command_hash: of what has started this.
    """

    parts: Parts
    machine: Machine
    choices: list[Choice]
    command_hash: str

    def run(self, named: Loaded | None) -> Result:
        """Resume if there is something to resume, train, and leave result and report however it ends."""
        parts = self.parts
        with parts.heart.working():
            loaded = find(parts, named, self.choices, self.command_hash)
            progress = restore(loaded, parts.step) if loaded else Progress()
        parts.world.note(RESUMED, str(progress.step))
        own = loaded is not None and is_own(loaded, parts.run)
        if loaded and own and parts.copies:
            parts.copies.make_up(loaded.path)
        before = parts.run.result()
        if own and before and before.status == "finished" and progress.epoch >= parts.job.train.epochs:
            if parts.world.first:
                epochs = count(progress.epoch, "epoch")
                parts.observer.warn(f"{parts.run.directory} has finished its {epochs}; more: --set train.epochs=N")
            wait_for_copies(parts.copies, parts.world, parts.heart, parts.observer)
            return before
        if parts.world.first:
            parts = replace(parts, history=parts.run.note_start(time.time(), os.environ.get(LAUNCHED, "")))
        loop = Loop(parts, progress, saved=own)
        resumed_from = str(loaded.path) if loaded else ""
        try:
            if parts.world.first:
                parts.run.write_start(parts.job, self.machine)
            parts.observer.on(self._started(progress, loaded))
            if loaded:
                self._restore_random_state(loaded)
            finished = loop.run()
            heard = [] if finished else parts.world.gathered(parts.preemption.requested)
        except StopRequested:  # of one of several ranks, while the others wait for it: nothing more can be saved
            self._end(self._result(loop, "preempted", resumed_from, parts.preemption.requested), loop, alone=True)
            raise
        except Exception as error:
            failure = self._failure(error)
            if parts.world.size == 1 or not peer_lost(error):  # then that rank's end is what counts
                parts.world.note(FAILED, f"step {loop.progress.step}: {type(error).__name__}")
                self._end(self._result(loop, "failed", resumed_from, error=str(failure)), loop, alone=True)
            raise failure from error
        loop.memory.mark("end")
        stopped_by = next(filter(None, heard), "")
        result = self._result(loop, "finished" if finished else "preempted", resumed_from, stopped_by)
        self._end(result, loop)
        if not finished:  # after the result: a store may take longer than a notice gives
            self._wait_for_copies(loop, result)
        return result

    def _wait_for_copies(self, loop: Loop, result: Result) -> None:
        try:
            wait_for_copies(self.parts.copies, self.parts.world, self.parts.heart, self.parts.observer)
        except HotloopError as error:  # a store that does not encrypt them, say
            self._end(replace(result, status="failed", error=str(error)), loop)
            raise

    def _restore_random_state(self, loaded: Loaded) -> None:
        states, rank = loaded.state["random_states"], self.parts.world.data_rank
        if rank < states.shape[0]:  # further ranks go on from their seeds
            # Of 8,192 ranks each would else read all states, 83 MB.
            stored = isinstance(states, StoredTensor)
            restore_random_state(states.part((rank, 0), (1, states.shape[1]))[0] if stored else states[rank])

    def _started(self, progress: Progress, loaded: Loaded | None) -> Started:
        parts = self.parts
        return Started(
            run=parts.run,
            job=parts.job,
            steps=count_steps(parts.job, len(parts.train.dataset)),
            samples=len(parts.train.dataset),
            parameters=count_parameters(parts.step.model),
            resumed_from=str(loaded.path) if loaded else "",
            changed=changed_settings(loaded, parts.job) if loaded else [],
            progress=progress,
            choices=self.choices,
        )

    def _result(self, loop: Loop, status: Status, resumed_from: str, stopped_by: str = "", error: str = "") -> Result:
        progress = loop.progress
        arithmetic, samples_per_second = self.parts.arithmetic, progress.whole.samples_per_second
        # After an error of the GPU each question to it raises that error again.
        fed = DataSpeed() if status == "failed" else loop.data_meter.speed(self.parts.job)
        finished = status == "finished"
        weights = weights_sha256(inner(self.parts.step.model), self.parts.heart) if finished else ""
        return Result(
            status=status,
            stopped_by=stopped_by,
            name=self.parts.run.name,
            metrics=progress.metrics,
            epochs=progress.epoch,
            steps=progress.step,
            samples_per_second=samples_per_second,
            tokens_per_second=samples_per_second * self.parts.task.tokens_per_sample,
            flops_per_second=arithmetic.rate(samples_per_second),
            matrix_flops_per_second=arithmetic.matrix_rate,
            mfu=arithmetic.mfu(samples_per_second),
            captured=self.parts.step.captured,
            not_captured=self.parts.step.not_captured,
            data_wait_share=progress.whole.data_wait_share,
            data_speed_share=fed.share,
            data_slow=fed.slow,
            data_advice=fed.advice,
            decode=str(self.parts.job.data.decode),
            train_seconds=progress.whole.seconds,
            weights_sha256=weights,
            workers_replaced=self.parts.deaths.count,
            corrupt_files=[{"path": name, "reason": why} for name, why in sorted(progress.damages.items())],
            precision=self.parts.job.precision,
            device=self.parts.job.device,
            parameters=count_parameters(self.parts.step.model),
            resumed_from=resumed_from,
            error=error,
            memory={name: asdict(report) for name, report in loop.memory.reports},
        )

    def _failure(self, error: Exception) -> Exception:
        """A failed write in words; other errors as they are."""
        directory = self.parts.run.directory
        if isinstance(error, OSError | CheckpointError) and not directory.is_dir():
            return gone(directory)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO):
            return cannot_write(directory, error, HotloopError)
        return error

    def _end(self, result: Result, loop: Loop, alone: bool = False) -> None:
        """Leave result and report; a disk that is full must not hide why the run ended.

        Args:
            alone: other ranks may not have come to this end: of those that have, the first to say so leaves it.
        """
        world = self.parts.world
        if not (world.claims("result") if alone and world.folder else world.first):
            return
        try:
            self.parts.run.write_result(result)
            if loop.examples:
                write_examples(self.parts.run, loop.examples)
            if self.parts.job.log.report:
                write_report(self.parts.run)
        except OSError as error:
            self.parts.observer.warn(f"result or report could not be written: {error}")
        self.parts.observer.on(Ended(self.parts.run, result))


def weights_sha256(model: nn.Module, heart: Heart) -> str:
    """Hash over names, shapes, types and bytes of a model's state, in order of name; all ranks ask, the first knows it.

    0.8 GB/s on one core, and no more memory of the host than the largest tensor takes. Ranks go from one tensor to the
    next together: minutes, of tens of billions of weights, in which no message waits longer than a tensor takes.
    """
    digest = hashlib.sha256()
    for name, part in sorted(model.state_dict().items()):
        tensor = whole({name: part})[name]
        with heart.working():  # around the hash alone: a message between ranks that takes long is a hang
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        heart.world.any(False)
    return digest.hexdigest()
