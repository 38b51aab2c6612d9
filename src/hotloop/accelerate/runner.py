"""Switches accelerations on inside a script's process, one by one, and keeps those that help."""

import atexit
import json
import os
import time
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from math import hypot
from multiprocessing import parent_process
from multiprocessing.util import Finalize
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from hotloop.accelerate.forward import Bf16, ChannelsLast, Compile, Forward
from hotloop.accelerate.loading import Loading
from hotloop.accelerate.pace import Mean, Step, Window, agreed, enough, mean_of
from hotloop.accelerate.plan import Plan, kind_of
from hotloop.accelerate.ranks import Ranks
from hotloop.accelerate.switches import Allocator, CudnnAutotune, FusedOptimizer, Tf32, Threads, ZeroGrad
from hotloop.accelerate.termination import save_on_sigterm
from hotloop.accelerate.training import Switch, Training, models_seen
from hotloop.accelerate.waiting import Batches, ImageFolder, LoaderWorkers, Prefetch
from hotloop.attach.activity import CROWDED, Activity
from hotloop.attach.inside import Attachment, tell
from hotloop.attach.live import PublishedScript
from hotloop.attach.steps import StepFinder, until_regular
from hotloop.core.process import most_resident_bytes
from hotloop.core.speedup import FAILED, ON, UNDONE, UNFIT, Acceleration
from hotloop.train.memory import memory_report, memory_trouble

_LOOK = 3
"""Steps in which models are noted."""
_SECONDS = 3.0
_FEWEST, _MOST = 10, 200
"""Steps that are timed take so many seconds, or are so few or many."""
_RANKS_WARM_UP, _RANKS_STEPS = 15, 20
"""Ranks have to switch at the same step."""
_SLOWER = 0.02
"""Share of a step from which on an acceleration that costs time is taken back."""
_MUCH_SHORTER = 0.75
"""Share of a step as it was when an acceleration was taken back from which on it is tried again. On an H200 an
ImageFolder's crops brought nothing to steps of 0.12 s; those of 0.08 s, which others had made, waited for batches.
"""
_TOLD_SECONDS = 0.25
_LONGER, _NOT_ALL = "steps took longer with it", "another rank could not use it"
_PLAIN = 0.5
"""Share of a step at which one that is left needs no proof that it is not the machine's pace: that costs slow steps."""


def begin(module: Any, attachment: Attachment) -> None:
    """Accelerate the training in this process, once it trains."""
    runner = Runner(Plan(**attachment.settings), Path(attachment.folder))
    runner.start()
    os.register_at_fork(after_in_child=runner.forked)


class Runner:
    """Accelerates one process.

    Args:
        folder: where what came of it is written.
    """

    def __init__(self, plan: Plan, folder: Path) -> None:
        self._plan = plan
        self._folder = folder
        self._loading = Loading(lambda why, name="loader": self._failed(name, why))
        self._forward = Forward(self._failed)
        self._training: Training | None = None
        self._told: dict[str, Acceleration] = {}
        self._judged_at: dict[str, float] = {}
        self._notes: list[str] = []
        self._before = self._after = self._error = 0.0
        self._ratio = 1.0
        self._seen = 0
        self._steps: list[Step] = []
        self._wanted = 0
        self._run: Generator[int, Sequence[Step], None] | None = None
        self._began: float | None = None
        self._busy = 1.0
        self._queued: list[float] = []
        self._process = os.getpid()
        self._ended = False
        self._ranks: Ranks | None = None
        self._published: PublishedScript | None = None
        self._finder: StepFinder
        batches = self._batches = Batches(self._loading)
        made: list[Switch] = [
            Threads(), Allocator(), LoaderWorkers(batches, lambda: self._busy),
            ImageFolder(batches, lambda: self._busy), Prefetch(batches), CudnnAutotune(), ZeroGrad(), Tf32(),
            ChannelsLast(self._forward), Bf16(self._forward), Compile(self._forward), FusedOptimizer(),
        ]  # fmt: skip
        self._made = {one.name: one for one in made}
        self._switches = {name: one for name, one in self._made.items() if name in plan.names}

    def start(self) -> None:
        self._loading.install()
        self._finder = StepFinder(torch, self)
        atexit.register(self._leave)

    def forked(self) -> None:
        """This is a child that a fork made: it is left alone."""
        if self._seen:
            self._ended = True

    def began(self, device: torch.device, optimizer: Any) -> None:
        """The first step has ended."""
        if self._ended:
            return
        if self._run:  # it was taken for a script without an optimizer
            self._run.close()
        for name in self._told:
            self._take_back(name, UNDONE, "the script turned out to step otherwise")
        self._told.clear()
        self._ranks = self._ranks or Ranks()
        self._published = self._published or PublishedScript(torch, device, "run", self._folder)
        self._published.optimizer = optimizer
        self._training = Training(self._plan, self._ranks, device, optimizer)
        self._loading.adopt()
        self._batches.watch(device)
        save_on_sigterm()
        with suppress(OSError):  # the folder has gone with the one that waited for it
            (self._folder / f"trains-{os.getpid()}").touch()
        self._process = os.getpid()
        if parent_process():  # what multiprocessing forks ends without atexit
            Finalize(None, self._leave, exitpriority=0)
        self._began, self._steps = None, []
        self._run = self._accelerate(self._training)
        self._wanted = next(self._run)

    def changed(self) -> None:
        """Another optimizer tells the steps now."""
        self._began = None

    def stepped(self) -> None:
        """A step has ended."""
        if self._ended:
            return
        self._seen += 1
        self._forward.guard.end_step()
        now, waited, samples = time.perf_counter(), self._loading.waited, self._loading.samples
        self._loading.waited, self._loading.samples = 0.0, 0
        if self._began is not None:
            assert self._published
            self._published.stepped(now - self._began, waited, self._seen, samples)
            if self._run:
                self._steps.append(Step(now - self._began, waited))
        self._began = now
        if self._run and len(self._steps) >= self._wanted:
            self._proceed()

    def _proceed(self) -> None:
        steps, self._steps = self._steps, []
        assert self._run
        try:
            self._wanted = self._run.send(steps)
        except StopIteration:
            self._run = None
        except Exception as error:  # the script goes on
            self._run = None
            self._notes.append(f"{type(error).__name__}: {error}")
        self._began = time.perf_counter()  # what was done in between is none of the script's time

    def _accelerate(self, training: Training) -> Generator[int, Sequence[Step], None]:
        """All that is done, in order."""
        with models_seen(training):
            yield _LOOK
        before = Mean(0.0, 0.0, 0.0)
        if not self._plan.tell:  # who is told compares trials: what there was before is another one's affair
            yield from self._regular(training)
            before = yield from self._timed(training)
        self._before = before.seconds
        for name, switch in [*self._switches.items()] * 2:
            if name in self._told and not self._worth_another_try(name, before):
                continue
            # A few steps may not have waited for batches where others will.
            training.waits = 1.0 if self._plan.asked else before.waits
            if self._is_fit(name, switch, training) and self._switched_on(name, training) and self._plan.measure:
                before = yield from self._judged(name, training, before)
        if self._plan.measure:
            self._set_step_times(before)
        else:
            after = yield from self._settled(training)
            self._after, training.waits = after.seconds, after.waits
            if self._before:
                share, error = after.over(before)
                self._error = error / share
        if self._plan.tell:
            yield from self._telling(training)

    def _worth_another_try(self, name: str, now: Mean) -> bool:
        """Whether what is off is worth it: shorter steps may wait for batches where longer ones did not."""
        told = self._told[name]
        undone = told.state == UNDONE and now.seconds < _MUCH_SHORTER * self._judged_at.get(name, 0.0)
        return told.state == UNFIT or undone

    def _judged(self, name: str, training: Training, before: Mean) -> Generator[int, Sequence[Step], Mean]:
        """Keep what has been switched on, or take it back: by steps with it, without it, and with it again, each
        against those just before. The mean of steps as they are then.
        """
        self._judged_at[name] = before.seconds
        least = 0.0 if training.must_help else -_SLOWER  # certain or not: in doubt the script stays as it is
        first = yield from self._settled(training)
        if self._has_failed(name, training):
            return before
        shares, after = [first.over(before)], first
        if shares[0][0] > _PLAIN:
            self._switches[name].switch_off()
            after = yield from self._settled(training)
            shares.append(first.over(after))
        if 1 - min(shares)[0] < least:
            self._told[name] = replace(self._told[name], state=UNDONE, why=_LONGER)
        elif len(shares) > 1 and self._switched_on(name, training):
            second = yield from self._settled(training)
            if self._has_failed(name, training):
                return after
            shares.append(second.over(after))
            if 1 - agreed(shares)[0] < least:
                self._take_back(name, UNDONE, _LONGER)
                after = yield from self._settled(training)
            else:
                after = second
        share, error = agreed(shares)
        if self._told[name].state == ON:
            self._ratio /= share
            self._error = hypot(self._error, error / share)
        if self._told[name].state != FAILED:
            self._told[name] = replace(self._told[name], gain=1 - share, error=error)
        self._set_step_times(after)
        return after

    def _set_step_times(self, after: Mean) -> None:
        """What steps take now. The script alone would take as much more as accelerations have brought: what else has
        changed since it was timed is the machine's pace.
        """
        self._after, self._before = after.seconds, self._ratio * after.seconds

    def _settled(self, training: Training) -> Generator[int, Sequence[Step], Mean]:
        """What steps take once they are regular."""
        yield from self._regular(training)
        return (yield from self._timed(training))

    def _has_failed(self, name: str, training: Training) -> bool:
        """Whether what was switched on has broken meanwhile, here or in another rank."""
        if training.ranks.any(self._told[name].state != ON):
            self._take_back(name, FAILED, _NOT_ALL)
            return True
        return False

    def _telling(self, training: Training) -> Generator[int, Sequence[Step], None]:
        """Tell what some steps took, again and again, until asked to end. The script is not asked: it would save."""
        number = max(1, round(_TOLD_SECONDS / self._after))
        training.waits = 1.0  # only what lasts is told: who does not wait now may, once steps are shorter
        useless = [name for name, one in self._made.items() if name not in self._told and one.unfit(training)]
        useless += ["workers", "prefetch_factor"] if "loader" in useless else []
        useless = [name for name in useless if name != "threads"]
        with (self._folder / f"told-{os.getpid()}.jsonl").open("a") as file:
            while not training.ranks.any((self._folder / "stop").exists()):
                # The stock rises and falls within windows as short as these; all of them together tell.
                steps = (yield from self._window(training, number)).steps
                mean = self._mean(training, Window(steps)).seconds
                broken = [f"{one.name}: {one.why}" for one in self._told.values() if one.state == FAILED]
                trouble = broken[0] if broken else memory_trouble(memory_report(training.device))
                if not int(os.environ.get("RANK", "0")):
                    file.write(json.dumps({"seconds": mean, "useless": useless, "trouble": trouble}) + "\n")
                    file.flush()
        os._exit(0)

    def _regular(self, training: Training) -> Generator[int, Sequence[Step], None]:
        if training.ranks.number > 1:
            yield _RANKS_WARM_UP
        else:
            yield from until_regular()

    def _timed(self, training: Training) -> Generator[int, Sequence[Step], Mean]:
        """The mean of as many steps as the plan asks for; of the slowest rank."""
        first = yield 2
        seconds = fmean(step.seconds for step in first)
        number = max(_FEWEST, min(_MOST, int(_SECONDS / seconds)))
        number = enough(number, self._loading.stock())
        if training.ranks.number > 1:
            number = _RANKS_STEPS
        window = yield from self._window(training, self._plan.steps or number)
        if self._plan.steps or not self._plan.measure or training.ranks.number > 1:
            window = Window(window.steps)  # it may be too short to tell by its stock
        return self._mean(training, window)

    def _mean(self, training: Training, window: Window) -> Mean:
        mean = mean_of(window)
        *common, self._busy = training.ranks.largest(mean.seconds, mean.error, mean.waits, self._busy)
        return Mean(*common)

    def _window(self, training: Training, number: int) -> Generator[int, Sequence[Step], Window]:
        self._synchronize(training)
        workers = [worker.pid for worker in self._workers()]
        activity, worked, before = Activity(workers), self._loading.worked, self._loading.stock()
        steps = list((yield number))
        ended = time.perf_counter()
        self._synchronize(training)
        steps[-1] = replace(steps[-1], seconds=steps[-1].seconds + time.perf_counter() - ended)
        waited = sum(step.waited for step in steps)
        busy = (self._loading.worked - worked) / waited if waited else 0.0
        self._busy = activity.workers_busy(workers) if workers else busy
        if not workers and torch.get_num_threads() <= training.processors:  # else it is the script that wants too many
            self._queued.append(activity.queued())
        return Window(tuple(steps), before, self._loading.stock())

    def _workers(self) -> list[Any]:
        current = self._loading.current()
        return list(getattr(current.lane.iterator, "_workers", [])) if current else []

    def _synchronize(self, training: Training) -> None:
        if training.device.type == "cuda":
            torch.cuda.synchronize(training.device)

    def _is_fit(self, name: str, switch: Switch, training: Training) -> bool:
        """Whether it has something to do here; on some ranks alone it is not tried."""
        training.must_help = False
        told = Acceleration(name, kind_of(name).level, UNFIT)
        try:
            told = replace(told, why=switch.unfit(training))
        except Exception as error:  # the run goes on without it
            told = replace(told, state=FAILED, why=f"{type(error).__name__}: {error}")
        unfit, failed = training.ranks.largest(float(bool(told.why)), float(told.state == FAILED))
        if unfit and not told.why:
            told = replace(told, why=_NOT_ALL)
        self._told[name] = replace(told, state=FAILED) if failed else told
        return not unfit

    def _switched_on(self, name: str, training: Training) -> bool:
        """Whether it is on, on all ranks."""
        switch, told = self._switches[name], self._told[name]
        try:
            switch.switch_on(training)
            told = replace(told, state=ON, why=kind_of(name).what)
        except Exception as error:  # the run goes on without it
            with suppress(Exception):
                switch.switch_off()
            told = replace(told, state=FAILED, gain=None, why=f"{type(error).__name__}: {error}")
        self._told[name] = told
        return not self._has_failed(name, training)

    def _take_back(self, name: str, state: str, why: str) -> None:
        if self._told[name].state == ON:
            # What had been measured holds no longer, if it has failed.
            if state == FAILED and self._told[name].gain is not None:
                self._told[name] = replace(self._told[name], gain=None)
                self._notes.append(f"{name} failed after it was timed: it is still in the time of a step above")
            self._told[name] = replace(self._told[name], state=state, why=why)
            self._switches[name].switch_off()

    def _failed(self, name: str, why: str) -> None:
        """An acceleration has broken, and has been taken back."""
        blamed = (name, "image_folder") if name == "loader" else (name,)
        for each in (one for one in blamed if one in self._told and self._told[one].state == ON):
            self._take_back(each, FAILED, why)
            tell(f"{each} was undone: {why}")

    def _leave(self) -> None:
        if self._ended or os.getpid() != self._process:
            return
        self._ended = True
        self._finder.stop()
        self._forward.remove()
        if self._training and self._seen:
            self._write(self._training)
        self._loading.leave()

    def _write(self, training: Training) -> None:
        memory = {"host_peak": most_resident_bytes()}
        if training.device.type == "cuda":
            with suppress(RuntimeError):  # after an error of the GPU each question to it raises that error again
                report = memory_report(training.device)
                memory |= {"device_peak": report.peak_bytes, "device_total": report.total_bytes}
        guard = self._forward.guard
        if guard.checked:
            apart = f"at most {guard.largest:.2%} apart, no more than they may by chance"
            self._notes.append(f"{guard.checked} losses were compared with exact ones; {apart}")
        if self._queued and (queued := fmean(self._queued)) > CROWDED:
            why = "other programs use them, and gains may be theirs"
            self._notes.append(f"threads waited for a processor {queued:.0%} of the time: {why}")
        if training.data_parallel:
            why = "copies the model to all GPUs in each step, DistributedDataParallel does not"
            self._notes.append(f"DataParallel {why}: hotloop profile says what it costs")
        if self._run:
            self._notes.append("the script ended before all accelerations were tried")
        told = [replace(one, count=self._switches[one.name].count) for one in self._told.values()]
        found = {
            "rank": int(os.environ.get("RANK", "0")), "device": training.device.type, "steps": self._seen,
            "before_seconds": self._before, "after_seconds": self._after, "relative_error": self._error,
            "accelerations": [asdict(one) for one in told], "notes": self._notes, "memory": memory,
        }  # fmt: skip
        unfinished = self._folder / f"speedup-{os.getpid()}.part"
        with suppress(OSError):  # as above
            unfinished.write_text(json.dumps(found))
            unfinished.replace(unfinished.with_suffix(".json"))
