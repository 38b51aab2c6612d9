"""The training loop, from top to bottom.

A run is a sequence of steps. Between two steps it can be saved, stopped and continued, and its weights at the end are
the same however often that happens: the position says which samples come next and how they are augmented, the rest is
in the checkpoint.
"""

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from hotloop.core.errors import NonFiniteLoss
from hotloop.core.history import History
from hotloop.core.job import Job
from hotloop.core.run import Run
from hotloop.tasks.task import Example, Task
from hotloop.train.agreement import Agreement, Wishes
from hotloop.train.checkpoint.checkpointer import Checkpointer, newest_path
from hotloop.train.checkpoint.copies import Copies
from hotloop.train.checkpoint.parts import State
from hotloop.train.checkpoint.saving import Saving
from hotloop.train.checkpoint.schedule import SaveSchedule
from hotloop.train.copying import tell_copies, wait_for_copies, wait_together
from hotloop.train.damages import Damages
from hotloop.train.data_meter import DataMeter, StepTimer
from hotloop.train.flops import Arithmetic, matrix_rate
from hotloop.train.heartbeat import Heart
from hotloop.train.losses import Losses, check_finite
from hotloop.train.memory import LeakDetector, MemoryMarks, peak_memory_bytes
from hotloop.train.observer import Logged, Observer, Saved, Validated
from hotloop.train.patience import StopRequested, WorkerDeaths
from hotloop.train.preemption import Preemption
from hotloop.train.preparation import Preparation
from hotloop.train.progress import Meter, Progress, Span
from hotloop.train.random_state import random_state, stacked
from hotloop.train.ranks import inner
from hotloop.train.resolve import optimizer_copies
from hotloop.train.slow_rank import SlowRanks
from hotloop.train.source import DeviceBatch, LoaderSource, Source
from hotloop.train.step import Step
from hotloop.train.validate import validate
from hotloop.train.window import Window
from hotloop.train.world import ALONE, SAVED, World

_PROBE_SIZE = 4096
"""Of the matrices by which ranks are compared: 0.2 GiB, and 10¹² operations in all."""
_LOG_STEPS, _LOG_SECONDS = 10, 0.25
"""log.every = "auto": every 10 steps, but not more than four lines a second."""


@dataclass(frozen=True)
class Parts:
    """What a loop is made of.

    Attributes:
        job: as resolved.
        val: None if there is nothing to validate on.
        identity: what a checkpoint must agree with to be continued; kept in each.
        arithmetic: what its speed is measured against.
        world: the processes that train together; the first one writes and tells.
        heart: shows what this one is at.
        history: of the run's earlier starts; the first rank's alone is asked.
        copies: of its checkpoints; of the first rank, if they are wanted.
        preparation: what is done with a batch before the step has it.
        deaths: of data workers.
    """

    job: Job
    run: Run
    task: Task
    step: Step
    train: Source
    val: Source | None
    observer: Observer
    preemption: Preemption
    identity: dict[str, str]
    arithmetic: Arithmetic
    deaths: WorkerDeaths
    world: World = ALONE
    heart: Heart = field(default_factory=lambda: Heart(ALONE))
    history: History = field(default_factory=History)
    copies: Copies | None = None
    preparation: Preparation = field(default_factory=Preparation)


@dataclass(frozen=True)
class _Begun:
    """A checkpoint on its way.

    Attributes:
        started: when, by `perf_counter`.
        stalled_seconds: for so long the training has waited.
    """

    saving: Saving
    progress: Progress
    started: float
    stalled_seconds: float


class Loop:
    """Trains from a position until the job's epochs are done or someone asks to stop.

    Args:
        saved: whether the position it starts from is one of the run's checkpoints.

    Attributes:
        progress: where it stands.
        data_meter: how well it is fed.
        examples: predictions of the last validation, once the epochs are done.
        memory: when the loop was ready, and after the first steps.
    """

    def __init__(self, parts: Parts, progress: Progress, saved: bool = False) -> None:
        job = parts.job
        self.progress = progress
        self.examples: list[Example] = []
        self._parts = parts
        self._job = job
        self._device = torch.device(job.device)
        self._checkpointer = Checkpointer(
            parts.run.checkpoints, job.checkpoint.keep, background=bool(job.checkpoint.background),
            rank=parts.world.rank, ranks=parts.world.size, warn=parts.observer.warn,
        )  # fmt: skip
        self._saving: _Begun | None = None
        self._saves = SaveSchedule(job.checkpoint.every, job.checkpoint.interruption.amount, history=parts.history)
        parts.heart.planned(self._saves.every_seconds)
        self._losses = Losses(parts.step.losses, parts.train.dataset, parts.world)
        self._batches = parts.train.batches(progress.epoch, progress.batch, job.train.epochs - progress.epoch)
        self._meter = Meter()
        self.data_meter = DataMeter(self._device)
        self._timer = self.data_meter.timer
        # What is on the device is not waited for, and several ranks stop between steps alone.
        may_stop_within = job.train.accumulate > 1 and parts.world.size == 1 and isinstance(parts.train, LoaderSource)
        self._window = Window(inner(parts.step.model)) if may_stop_within else None
        self._steps_unmeasured = 0
        self._unlogged = Span()
        self._logged = 0.0
        self._since_log = Span()
        self._damages = Damages([each for each in (parts.train, parts.val) if each], parts.world, parts.observer.warn)
        self._leaks = LeakDetector(parts.observer.warn)
        self.memory = MemoryMarks(self._device)
        self.memory.mark("ready")
        self._saved = progress.position if saved else None
        self._world = parts.world
        self._agreement = Agreement(parts.world)
        rate = partial(matrix_rate, self._device, job.precision, _PROBE_SIZE) if self._device.type == "cuda" else None
        self._slow_ranks = SlowRanks(parts.world, rate, parts.observer.warn)
        self._agreed_to_stop = False

    def run(self) -> bool:
        """Train. Returns whether the epochs are done; if not, the run was asked to stop and is saved, if
        there was anything to save.

        Copies of checkpoints are not waited for then.
        """
        with closing(self._batches), self._closed_at_the_end():
            try:
                self._stop_before_a_step()
                self._reserve()
                while self.progress.epoch < self._job.train.epochs:
                    self._train_epoch()
                    self._end_epoch()
            except StopRequested:
                if self._world.size > 1 and not self._agreed_to_stop:
                    raise  # a batch does not come, and the other ranks wait within a step: nothing can be saved
                if self._window:
                    self._window.undo()
                self._save_and_wait()
                self._agreement.finish()
                return False
            except NonFiniteLoss as error:
                self._save_what_is_begun()
                raise self._with_last_good(error) from None
            except Exception:
                self._save_what_is_begun()
                raise
            self._save_and_wait()
            wait_for_copies(self._parts.copies, self._world, self._parts.heart, self._parts.observer)
            self._agreement.finish()
            return True

    def _stop_before_a_step(self) -> None:
        """Where a notice is there already. What was begun from a checkpoint by name is saved as this run's own."""
        to_do = self.progress.epoch < self._job.train.epochs
        if self._world.any(to_do and bool(self._parts.preemption.requested)):
            self._agreed_to_stop = True
            if not self.progress.step:
                self._saved = self.progress.position  # there is nothing to be lost
            raise StopRequested

    @contextmanager
    def _closed_at_the_end(self) -> Iterator[None]:
        """What writes checkpoints ends what it has begun."""
        try:
            yield
        finally:
            self._parts.heart.enter("ending")  # also after an error in a step, which is not to be ended as a hang
            with self._parts.heart.working():
                self._checkpointer.close()

    def _save_what_is_begun(self) -> None:
        """A training that fails has its last checkpoint all the same. Several ranks do not wait for each other then."""
        if self._world.size == 1:
            with suppress(Exception):  # why the training fails says more
                self._end_saving(copy=False)  # the next start does that

    def _reserve(self) -> None:
        """Take memory for checkpoints before the first step, not within the first save's stall."""
        epochs = self._job.train.epochs
        if not self._saves.may_come(epochs, epochs * -(-len(self._parts.train) // self._job.train.accumulate)):
            return
        step = self._parts.step
        state = step.state_dict()
        learnt = [(name, one.detach()) for name, one in inner(step.model).named_parameters() if one.requires_grad]
        to_come = 0 if state["optimizer"]["state"] else optimizer_copies(self._job)
        self._checkpointer.reserve([state, *[dict(learnt)] * to_come])

    def _train_epoch(self) -> None:
        """The rest of the epoch, step by step."""
        self._meter.start()
        batches = len(self._parts.train)
        while self.progress.batch < batches:
            self._train_step(batches)
            self._look_at_saving()
            now = self._decided()
            if self.progress.batch < batches and now.log:
                self._log()
            if now.stop or (self._world.size == 1 and self._parts.preemption.requested):  # while it logged, say
                raise StopRequested
            if now.save:
                self._save()
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        self._log(wait=True)

    def _decided(self) -> Wishes:
        """What is done after this step: what steps decide at once, what clocks and signals do once all ranks agree."""
        log, save = self._log_is_due(), self._save_is_due(finished_epochs=None)
        if self._world.size == 1:
            return Wishes(bool(self._parts.preemption.requested), log, save)
        timed_log, timed_save = self._job.log.every == "auto" and not self._losses.full, self._saves.by_clock
        first = self._world.first
        wish = Wishes(
            bool(self._parts.preemption.requested), first and log and timed_log, first and save and timed_save
        )
        agreed = self._agreement.after_step(lambda: wish)
        self._agreed_to_stop = agreed.stop
        return Wishes(agreed.stop, agreed.log or (log and not timed_log), agreed.save or (save and not timed_save))

    def _train_step(self, batches: int) -> None:
        """One optimizer step over a window of batches; the last window of an epoch may be short."""
        first = self.progress.batch
        end = min(first + self._job.train.accumulate, batches)
        samples = sum(self._parts.train.size(number) for number in range(first, end))
        indices: list[np.ndarray] = []
        timer = self._timer if StepTimer.is_due(self.progress.step) else None
        if self._window:
            self._window.begin()
        for number in range(first, end):
            batch, beside = self._next_batch(), self._parts.preparation.stream
            if timer and beside:
                timer.start(beside)
            ready = self._parts.preparation(batch)
            if timer and not beside:
                timer.start()
            counted = self._parts.train.settings.counted(number, len(self._parts.train.dataset))
            share = counted * self._world.data_size / samples  # gradients are averaged over the ranks
            self._parts.step.run(ready, share=share, last=number == end - 1)
            if timer:
                timer.stop()
            indices.append(batch.indices)
        if self._window:
            self._window.end()
        if timer:
            timer.end(samples)
        self._steps_unmeasured += 1
        self.progress = replace(self.progress, batch=end, step=self.progress.step + 1)
        self._losses.add(self.progress.step, indices)
        self._meter.add(samples)
        self._parts.heart.step = self.progress.step
        if self._parts.heart.due:
            self._measure()
        self._parts.heart.beat()

    def _next_batch(self) -> DeviceBatch:
        self._parts.heart.enter("loading")
        started = time.perf_counter()
        try:
            with self._parts.preparation.loading():
                batch = next(self._batches)
        finally:  # a signal may end it
            self._meter.waited(time.perf_counter() - started)
        self._parts.heart.enter("step")
        return batch

    def _log_is_due(self) -> bool:
        if self._losses.full:
            return True
        every = self._job.log.every
        if every != "auto":
            return self.progress.step % every == 0
        return self.progress.step % _LOG_STEPS == 0 and time.monotonic() - self._logged >= _LOG_SECONDS

    def _measure(self) -> None:
        """Take in what went by since the last time. Costs no wait for the device."""
        span = self.data_meter.add(self._meter.take(), self._steps_unmeasured, self._parts.train.stages)
        self._parts.heart.measured(span, self._steps_unmeasured, self._parts.step.communication.seconds)
        self._steps_unmeasured = 0
        self._unlogged = self._unlogged.plus(span)
        self._since_log = self._since_log.plus(span)
        self._slow_ranks.add(span)

    def _log(self, wait: bool = False) -> None:
        """Bring the losses that have arrived to the host and tell the observer."""
        self._measure()
        span, self._unlogged = self._unlogged, Span()
        self._logged = time.monotonic()
        arrived = self._losses.take(wait or self.progress.whole.steps == 0)
        self.progress = self.progress.measured(span.plus(Span(loss_sum=sum(arrived), steps=len(arrived))))
        if not arrived or not self._since_log.samples:
            return
        self._look_at_memory()
        samples_per_second = self._since_log.samples_per_second
        self._parts.observer.on(
            Logged(
                progress=self.progress,
                loss=sum(arrived) / len(arrived),
                learning_rate=self._parts.step.learning_rate,
                samples_per_second=samples_per_second,
                tokens_per_second=samples_per_second * self._parts.task.tokens_per_sample,
                flops_per_second=self._parts.arithmetic.rate(samples_per_second),
                mfu=self._parts.arithmetic.mfu(samples_per_second),
                data_wait_share=self._since_log.data_wait_share,
                memory_bytes=peak_memory_bytes(self._device),
                scale=self._parts.step.scale,
            )
        )
        self._since_log = Span()
        self._damages.tell()

    def _look_at_memory(self) -> None:
        if self._device.type == "cuda":
            self._leaks.look(self.progress.step)
        if len(self.memory.reports) == 1:
            self.memory.mark("first steps")

    def _end_epoch(self) -> None:
        """Validate, report, go on to the next epoch."""
        started = time.perf_counter()
        metrics = self._validate() if self._parts.val else {}
        self.progress = replace(self.progress, metrics={**metrics, "train_loss": self.progress.current.mean_loss})
        due = self._world.first and self._save_is_due(self.progress.epoch + 1)
        # The GPUs wait meanwhile: one message, where gathering takes two of 1 ms each.
        save, damaged = self._world.any_of([due, not self._damages.met().keys() <= self.progress.damages.keys()])
        if damaged:
            self._note_damages()
        self._damages.tell()
        self._parts.observer.on(Validated(self.progress, metrics, time.perf_counter() - started))
        self._meter.start()  # a validation is no training
        self.progress = replace(self.progress, epoch=self.progress.epoch + 1, batch=0, current=Span())
        if save:
            self._save()

    def _validate(self) -> dict[str, float]:
        assert self._parts.val is not None
        self._parts.heart.enter("validating")
        self._agreement.pace_changes()
        metrics = validate(
            self._parts.task,
            self._parts.step,
            self._parts.val,
            stop=self._stops_validating,
            examples=self.examples if self.progress.epoch == self._job.train.epochs - 1 else None,
            notify=self._parts.observer.warn,
            world=self._world,
        )
        self._agreement.pace_changes()
        return metrics

    def _stops_validating(self) -> bool:
        self._parts.heart.beat()
        self._look_at_saving()
        wish = Wishes(stop=bool(self._parts.preemption.requested))
        self._agreed_to_stop = self._agreement.after_step(lambda: wish).stop
        return self._agreed_to_stop

    def _save_is_due(self, finished_epochs: int | None) -> bool:
        """By the clock none is while another is being written; by steps and epochs it is waited for."""
        busy = self._saving is not None and self._saves.by_clock
        return not busy and self._saves.due(self.progress.step, finished_epochs)

    def _save(self, last: bool = False) -> None:
        """Begin a checkpoint of this position, unless there is one. Weights that are not finite never become one."""
        if self._saved == self.progress.position:
            return
        self._parts.heart.enter("saving")
        self._log(wait=True)  # what the device still computes is no stall; all from here on is
        started, place = time.perf_counter(), (self.progress.step, self.progress.epoch)
        busy = self._saving is not None and not last
        wait_together(self._world, self._parts.heart, self._has_saved)
        waited = time.perf_counter() - started
        self._end_saving()
        if self._world.first and busy and (late := self._saves.wait_warning(waited)):
            self._parts.observer.warn(late)
        self._slow_ranks.compare()
        self._note_damages()
        check_finite(list(self._parts.step.model.parameters()), self.progress.step, self._world.where)
        if self._world.first:
            self._checkpointer.open(*place)
        self._world.from_first(None)  # the folder is there for all
        state = self._state()
        with self._parts.heart.working():  # without a process of its own for it, all is written here
            saving = self._checkpointer.begin(state, *place)
        self._saving = _Begun(saving, self.progress, started, time.perf_counter() - started)
        self._saved = self.progress.position
        self._look_at_saving()
        self._parts.heart.beat()
        self._meter.start()

    def _save_and_wait(self) -> None:
        """The checkpoint that a run ends with."""
        self._save(last=True)
        self._parts.heart.enter("saving")
        wait_together(self._world, self._parts.heart, self._has_saved)
        self._end_saving()

    def _has_saved(self) -> bool:
        return self._saving is None or self._saving.saving.done()

    def _look_at_saving(self) -> None:
        """Note that a checkpoint is whole, once it is."""
        if self._saving and self._saving.saving.done():
            self._end_saving()
        tell_copies(self._parts.copies, self._parts.observer)

    def _end_saving(self, copy: bool = True) -> None:
        """Wait until the one that is being written is whole."""
        if not self._saving:
            return
        begun, self._saving = self._saving, None
        with self._parts.heart.working():
            path = begun.saving.end()
        if self._world.first:
            self._world.note(SAVED, str(path))
            seconds = time.perf_counter() - begun.started
            self._saves.saved(begun.stalled_seconds, seconds)
            self._parts.heart.planned(self._saves.every_seconds)
            self._parts.observer.on(Saved(begun.progress, str(path), seconds, begun.stalled_seconds))
            if self._parts.copies and copy:
                with self._parts.heart.working():  # files are copied where they cannot be linked
                    self._parts.copies.begin(path)

    def _note_damages(self) -> None:
        self.progress = replace(self.progress, damages={**self.progress.damages, **self._damages.met_by_all()})

    def _state(self) -> State:
        """What a checkpoint holds; all ranks have to ask for it."""
        states = self._world.gathered_on_first(random_state())[:: self._world.tensor]  # that of a team is the same
        return {
            "identity": self._parts.identity,
            "job": self._job.model_dump(mode="json"),
            "step": self._parts.step.state_dict(),
            "random_states": stacked(states or [random_state()]),
            "progress": self.progress.to_state(),
        }

    def _with_last_good(self, error: NonFiniteLoss) -> NonFiniteLoss:
        found = newest_path(self._parts.run.checkpoints)
        last = f"the last good checkpoint is {found}" if found else "there is no checkpoint before it"
        return NonFiniteLoss(error.what, f"{error.cause}; {last}", error.fix)
