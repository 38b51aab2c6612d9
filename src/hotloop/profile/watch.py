"""Finds the steps of a script, measures a bounded number of them, and ends it or lets it go on."""

import atexit
import itertools
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from statistics import mean
from typing import Any, NoReturn

from hotloop.attach.activity import Activity
from hotloop.attach.inside import Attachment, tell
from hotloop.attach.live import PublishedScript
from hotloop.attach.malloc import can_keep
from hotloop.attach.steps import StepFinder, until_regular
from hotloop.profile.ablations import Ablations, are_forked
from hotloop.profile.cupti import detach_after_tracing
from hotloop.profile.facts import allocator_counts, script_facts
from hotloop.profile.hooks import Hooks, unnamed
from hotloop.profile.lines import Lines
from hotloop.profile.measured import ENOUGH, Block, LoaderFacts, Measured, StepTime
from hotloop.profile.models import Models
from hotloop.profile.plan import Plan

Steps = Generator[int, list[StepTime], None]
"""Asks for a number of steps, and is given them once they are done."""

_RANKS_WARM_UP, _RANKS_STEPS = 15, 20
"""Ranks have to agree without asking each other."""
_FEWEST, _MOST = ENOUGH, 300
"""Steps under a condition: enough for a mean of slow ones, and no more than are needed of fast ones. In 100 of 9 ms the
thread was looked at 64 times, and the share of its busiest line was off by 0.1 on some days."""
_TURNS = 4
"""Watched and bare steps take turns."""
_SETTLE = 3
"""Steps that go by before a condition is timed."""
_LOOK = 4
"""Steps in which waits are counted."""
_MOST_FOR_WAITS = 0.005
"""Of a step."""
_BFLOAT16 = (8, 0)
"""Compute capability from which on cards multiply in it."""
_WITHOUT_WAITS_SECONDS = 0.002
"""Between two looks at steps that are short, for want of waits."""
_MANY_FAULTS = 500
"""A step: 2 MB that it got from the system anew."""
_PATIENCE = 3
"""Times that a script may catch its own end before its process is ended at once."""


class Stop(SystemExit):
    """Ends the script in the way in which scripts end themselves."""


def begin(torch: Any, attachment: Attachment) -> None:
    """Watch this process from its first optimizer step on."""
    watch = Watch(torch, Plan(**attachment.settings), Path(attachment.folder))
    watch.start()
    os.register_at_fork(after_in_child=watch.forked)


class Watch:
    """Watches one process.

    Args:
        folder: where what was measured is written.
    """

    def __init__(self, torch: Any, plan: Plan, folder: Path) -> None:
        self._torch = torch
        self._plan = plan
        self._folder = folder
        self._hooks = Hooks(torch)
        self._ablations = Ablations(torch, self._hooks)
        self._models = Models(torch)
        self._device: Any = None
        self._measured = Measured()
        self._steps: list[StepTime] = []
        self._wanted = 0
        self._run: Steps | None = None
        self._wait_lines: dict[str, float] = {}
        self._ended = False
        self._events: list[Any] | None = None
        self._times_stopped = 0
        self._published: PublishedScript | None = None
        self._finder: StepFinder

    def start(self) -> None:
        self._hooks.install()
        self._finder = StepFinder(self._torch, self)
        atexit.register(self._leave)

    def forked(self) -> None:
        """This is a child that a fork made: a worker of a training, or one that trains itself."""
        if self._measured.steps_seen:
            self._ended = True
            self._hooks.remove()
        self._hooks.forked()

    @contextmanager
    def _unharmed(self) -> Iterator[None]:
        """The script goes on, whatever happens inside."""
        try:
            yield
        except Exception as error:
            self._note(f"{type(error).__name__}: {error}")
            if self._measured.left_out or self._plan.tool:  # what it trains has been spoiled, or nobody waits for it
                self._end()
            self._leave()

    def stepped(self) -> None:
        """A step has ended."""
        if not self._ended:
            with self._unharmed():
                self._mark()

    def changed(self) -> None:
        """Another optimizer tells the steps now."""
        self._hooks.drop_step()

    def _mark(self) -> None:
        step = self._hooks.mark()
        self._measured = replace(self._measured, steps_seen=self._measured.steps_seen + 1)
        if self._events is not None:
            self._events.append(self._event())
        if step is None:
            return
        if self._published:
            self._published.stepped(step.seconds, step.input, self._measured.steps_seen)
        if self._run is None:
            return
        self._steps.append(step)
        if len(self._steps) >= self._wanted:
            self._proceed()

    def _event(self) -> Any:
        event = self._torch.cuda.Event(enable_timing=True)
        event.record(self._torch.cuda.current_stream(self._device))
        return event

    def _proceed(self) -> None:
        assert self._run
        steps, self._steps = self._steps, []
        try:
            self._wanted = self._run.send(steps)
        except StopIteration:
            self._end()

    def began(self, device: Any, optimizer: Any) -> None:
        """The first step: what is trained, and where."""
        if self._ended:
            return
        if self._run:  # it was taken for a script without an optimizer
            self._run.close()
        self._device, self._steps = device, []
        self._published = self._published or PublishedScript(self._torch, device, "profile", self._folder)
        self._published.optimizer = optimizer
        self._measured = Measured(**script_facts(self._torch, device), steps_seen=self._measured.steps_seen)
        self._hooks.adopt(on_gpu=device.type == "cuda")
        self._hooks.drop_step()
        self._write()  # a process that ends by os._exit, as those of multiprocessing do, is not asked again
        self._run = self._measure()
        self._wanted = next(self._run)

    def _measure(self) -> Steps:
        """All that is measured, in order."""
        self._tell("waiting until steps are regular")
        number = yield from self._warm_up()
        if self._plan.tool:
            yield from self._recorded(self._plan.steps or self._plan.trace_steps)
            return
        self._tell(f"watching {number} steps")
        if self._measured.device == "cuda":
            yield from self._look_at_waits()
        activity, lines, used, counts = Activity(self._workers()), Lines(self._hooks.thread), 0.0, Counter[str]()
        self._hooks.sync_lines.clear()
        self._hooks.calls = 0
        for _ in range(_TURNS):  # what else goes on in the machine meets both alike
            with lines:
                started, before = time.thread_time(), self._counts()
                yield from self._block("watched", max(2, round(number / _TURNS)), settle=0)
                used += time.thread_time() - started
                counts.update({name: value - before[name] for name, value in self._counts().items()})
            self._keep(lines, activity, used, counts)
            with self._hooks.off():
                yield from self._block("bare", max(2, round(number / 2 / _TURNS)), settle=0)
        self._tell(f"tracing {self._plan.trace_steps} steps")
        with self._ablations.collecting():
            if self._torch._C._current_graph_task_id() == -1:
                yield from self._traced()
            else:  # torch crashes where a trace ends in the middle of backward
                self._note("no trace: the optimizer steps inside of backward")
                yield self._plan.trace_steps
        if self._plan.ablate:
            for name, condition in self._conditions():
                self._measured = replace(self._measured, left_out=name)
                self._write()
                self._tell(f"timing steps under the condition {name.replace('_', ' ')}")
                looking = Lines(self._hooks.thread, _WITHOUT_WAITS_SECONDS) if name == "no_sync" else None
                with condition(), looking or nullcontext():
                    yield from self._block(name, max(_FEWEST, number // 2), _SETTLE)
                if looking:
                    self._measured = self._measured.seen(name, looking.most_common(), looking.looks, looking.in_models)
                if self._models.objection:
                    self._note(f"{name} was not timed: {self._models.objection}")
                    self._models.objection = ""
                    self._measured = self._measured.without_block(name)
        self._measured = replace(self._measured, complete=True)

    def _tell(self, text: str) -> None:
        if self._measured.rank == 0 and self._plan.progress:
            tell(text)

    def _look_at_waits(self) -> Steps:
        """Time each wait in a few steps; in those that are watched only if that costs next to nothing."""
        self._hooks.sync_lines.clear()
        self._hooks.calls = 0
        steps = yield _LOOK
        calls = self._hooks.calls / len(steps)
        self._measured = replace(self._measured, waits=calls)
        if calls * self._hooks.seconds_a_wait() > _MOST_FOR_WAITS * mean(step.seconds for step in steps):
            self._wait_lines = {line: total / len(steps) for line, total in self._hooks.sync_lines.items()}
            self._hooks.time_waits(False)

    def _recorded(self, number: int) -> Steps:
        """Have another profiler record steps."""
        self._tell(f"{self._plan.tool} records {number} steps")
        if self._plan.tool == "perf":
            with (self._folder / "control").open("w") as control:
                control.write("enable\n")
                control.flush()
                yield number
                control.write("disable\n")
        else:
            if self._measured.device != "cuda":
                raise RuntimeError(f"{self._plan.tool} records steps on a GPU, and this training is on none")
            cuda = self._torch.cuda
            cuda.profiler.start()
            for step in range(number):
                cuda.nvtx.range_push(f"step {step}")
                yield 1
                cuda.nvtx.range_pop()
            cuda.synchronize(self._device)
            cuda.profiler.stop()
        self._measured = replace(self._measured, complete=True)

    def _warm_up(self) -> Generator[int, list[StepTime], int]:
        """Until compilation, search and filling of queues are over. Returns how many steps to measure then."""
        if self._measured.world_size > 1:
            yield _RANKS_WARM_UP
            return self._plan.steps or _RANKS_STEPS
        steps: Sequence[StepTime] = yield from until_regular(lambda step: step.compiling > 0)
        seconds = mean(step.seconds for step in steps)
        return self._plan.steps or max(_FEWEST, min(_MOST, int(self._plan.seconds / seconds)))

    def _block(self, name: str, number: int, settle: int) -> Steps:
        if settle:
            yield settle
        gpu = self._measured.device == "cuda"
        activity, self._events = Activity([]), [self._event()] if gpu else None
        self._ablations.reading_seconds = 0.0
        steps = yield number
        own = self._ablations.reading_seconds / len(steps)
        events, self._events = self._events or [], None
        device_seconds: tuple[float, ...] = ()
        if gpu:
            events[-1].synchronize()  # torch.cuda.synchronize does nothing under one of the conditions
            device_seconds = tuple(a.elapsed_time(b) / 1000 for a, b in itertools.pairwise(events))
        self._measured = self._measured.with_block(
            Block(name, tuple(steps), activity.queued(), activity.late(), {}, device_seconds, own)
        )
        self._write()  # whatever becomes of the script from here on

    def _traced(self) -> Steps:
        profiler, number = self._torch.profiler, self._plan.trace_steps
        if self._measured.world_size == 1:  # workers give their batches by turns: two rounds of them
            number = max(number, min(24, 2 * len(self._workers())))
        self._hooks.time_waits(True)  # the trace tells them by our ranges
        on_gpu = self._measured.device == "cuda"
        if on_gpu:
            detach_after_tracing(self._torch, os.environ)
        trace = profiler.profile(activities=list(profiler.supported_activities()), profile_memory=True)
        yield 1
        trace.start()
        try:
            self._hooks.annotate = self._torch.profiler.record_function
            yield 1  # the first one that is traced takes longer
            with self._mark_in_trace():
                pass
            self._hooks.on_mark = self._mark_in_trace
            yield number
        finally:  # a process that ends with a profiler at work may crash
            self._hooks.on_mark = None
            self._hooks.annotate = unnamed
            self._hooks.time_waits(not self._wait_lines)
            if on_gpu:
                self._torch.cuda.synchronize(self._device)
            trace.stop()
        file = self._folder / f"trace-{os.getpid()}.json"
        trace.export_chrome_trace(str(file))
        if on_gpu:  # CUPTI detaches where a call of CUDA returns, and the script may be about to end
            self._torch.cuda.synchronize(self._device)
        self._measured = replace(self._measured, trace=file.name)
        self._hooks.drop_step()

    def _mark_in_trace(self) -> AbstractContextManager[Any]:
        mark: AbstractContextManager[Any] = self._torch.profiler.record_function("hotloop::mark")
        return mark

    def _conditions(self) -> Iterator[tuple[str, Callable[[], AbstractContextManager[None]]]]:
        """The loader's come last, as they leave its queues full. Several ranks do the same, whatever each has seen."""
        ablations, measured = self._ablations, self._measured
        if measured.world_size > 1:
            yield "cached_batch", ablations.cached_batches
            if self._models.distributed:
                yield "no_communication", self._with_batches(self._models.without_communication)
            return
        if measured.facts["threads"] > measured.facts["processors"]:
            yield "fewer_threads", ablations.fewer_threads
        if ablations.has_batches:
            yield "cached_batch", ablations.cached_batches
            if measured.loader and measured.loader.workers and measured.loader.is_busy:
                yield "cached_samples", ablations.cached_samples
        if measured.device == "cuda":
            if ablations.has_batches:
                yield "batch_on_device", ablations.batches_on_device
            if measured.sync_lines:
                yield "no_sync", ablations.without_waits
            if measured.memory["num_empty_caches_a_step"]:
                yield "no_empty_cache", ablations.without_empty_cache
            if self._models.on_several_gpus:
                yield "first_gpu_alone", self._with_batches(self._models.first_part_alone)
            if self._models.in_float32 and self._torch.cuda.get_device_capability(self._device) >= _BFLOAT16:
                yield "bfloat16", self._with_batches(self._models.under_autocast)
        elif can_keep() and measured.memory["num_page_faults_a_step"] > _MANY_FAULTS:
            yield "kept_memory", ablations.kept_memory

    def _with_batches(
        self, condition: Callable[[], AbstractContextManager[None]]
    ) -> Callable[[], AbstractContextManager[None]]:
        """The same with batches given again: queues may be full from conditions before."""

        @contextmanager
        def both() -> Iterator[None]:
            with condition(), self._ablations.cached_batches():
                yield

        return both

    def _workers(self) -> list[int]:
        return [worker.pid for worker in getattr(self._hooks.loader(), "_workers", [])]

    def _note(self, text: str) -> None:
        self._measured = replace(self._measured, unseen=(*self._measured.unseen, text))

    def _counts(self) -> dict[str, float]:
        return {**allocator_counts(self._torch, self._device), "num_empty_caches": self._hooks.empty_caches}

    def _keep(self, lines: Lines, activity: Activity, used: float, counts: Mapping[str, float]) -> None:
        """What goes with the watched steps.

        Args:
            used: seconds of a processor that the thread that trains has had meanwhile.
            counts: what the allocator has done meanwhile.
        """
        watched = self._measured.block("watched")
        assert watched
        number, seconds = len(watched.steps), sum(step.seconds for step in watched.steps)
        self._measured = replace(
            self._measured.seen("watched", lines.most_common(), lines.looks, lines.in_models),
            loader=self._loader_facts(activity, used / seconds),
            hooks_ratio=(lines.seconds + (self._hooks.calls + number) * self._hooks.seconds_a_call()) / seconds,
            sync_lines=self._wait_lines or {line: total / number for line, total in self._hooks.sync_lines.items()},
            memory={
                **{name: value for name, value in self._counts().items() if not name.startswith("num")},
                **{f"{name}_a_step": value / number for name, value in counts.items() if name.startswith("num")},
            },
        )

    def _loader_facts(self, activity: Activity, busy: float) -> LoaderFacts | None:
        iterator = self._hooks.loader()
        if iterator is None:
            return None
        workers = self._workers()
        return LoaderFacts(
            line=self._hooks.loader_line,
            workers=len(workers),
            batch_size=getattr(iterator._index_sampler, "batch_size", 0) or 0,
            pin_memory=bool(iterator._pin_memory),
            persistent_workers=bool(getattr(iterator, "_persistent_workers", False)),
            prefetch_factor=getattr(iterator, "_prefetch_factor", 0) or 0,
            dataset=type(iterator._dataset).__name__,
            workers_busy=activity.workers_busy(workers) if workers else busy,
            epoch_start_seconds=tuple(second for second in self._hooks.epoch_starts if second > 0),
            can_be_replaced=are_forked(iterator) and threading.current_thread() is threading.main_thread(),
        )

    def _end(self) -> None:
        self._leave()
        if self._plan.stop:
            if threading.current_thread() is not threading.main_thread():
                _exit()  # only this thread would stop, and others may wait for it
            import_module("torch.optim.optimizer").register_optimizer_step_post_hook(self._stop)
            raise Stop(0)

    def _stop(self, *_: object) -> None:
        """The script went on all the same: it catches whatever is raised."""
        self._times_stopped += 1
        if self._times_stopped > _PATIENCE:
            _exit()
        raise Stop(0)

    def _leave(self) -> None:
        """Write down what there is, and leave the process alone from now on."""
        if self._ended:
            return
        self._ended = True
        if self._run:
            self._run.close()
        self._hooks.remove()
        self._finder.stop()
        if self._published:
            self._published.close()
        self._ablations.forget()
        if self._measured.steps_seen:
            self._write()

    def _write(self) -> None:
        unseen = list(self._measured.unseen)
        if self._hooks.in_another_thread:
            unseen.append(
                "waiting for data is not seen: a DataLoader is iterated over by another thread than the one that trains"
            )
        elif self._measured.loader is None:
            unseen.append("waiting for data is not seen: no DataLoader gave batches to the thread that trains")
        with suppress(OSError):  # the folder has gone with the one that waited for it
            replace(self._measured, unseen=tuple(unseen)).save(self._folder)


def _exit() -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # the script has closed it
            stream.flush()
    os._exit(0)
