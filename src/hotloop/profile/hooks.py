"""What a script's calls are watched by: DataLoaders, copies to a GPU, waits for it, compilation."""

import gc
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any
from weakref import ref

from hotloop.attach.imports import when_imported
from hotloop.attach.patches import Patches
from hotloop.profile.lines import Places, script_line
from hotloop.profile.measured import StepTime

_WAITS = ("item", "cpu", "numpy", "tolist", "__bool__", "__float__", "__int__")
"""Of a tensor on a GPU these return once it is computed."""


_NOTHING: AbstractContextManager[Any] = nullcontext()


def unnamed(name: str) -> AbstractContextManager[Any]:
    """Open no range."""
    return _NOTHING


class Hooks:
    """Adds up what goes by between two marks, in the thread that trains.

    Attributes:
        active: whether anything is added up; if not, what is replaced costs a test a call.
        stand_in: gives batches in place of a loader's own, in ablations; see `Ablations`.
        annotate: opens a named range in a trace; does nothing while none is recorded.
        on_mark: opens the range that stands for a mark there.
        loader: gives the iterator of the DataLoader that was asked last, while it lives.
        calls: that have been timed.
        in_another_thread: whether a DataLoader was iterated over by a thread that does not train.
    """

    def __init__(self, torch: Any) -> None:
        self.active = True
        self.stand_in: Callable[[Any, Callable[[], Any]], Any] | None = None
        self.on_mark: Callable[[], AbstractContextManager[Any]] | None = None
        self.annotate: Callable[[str], AbstractContextManager[Any]] = unnamed
        self.loader: Callable[[], Any] = lambda: None
        self.loader_line = ""
        self.in_another_thread = False
        self.epoch_starts: list[float] = []
        self.sync_lines: dict[str, float] = defaultdict(float)
        self.thread = threading.get_ident()
        self.empty_caches = 0
        self.calls = 0
        self.input = self.sync = self.compiling = 0.0
        self.loads = 0
        self.calls_in_step = 0
        self.regular = True
        self._torch = torch
        self._patches = Patches()
        self._places = Places()
        self._process = os.getpid()
        self._on_gpu = False
        self._times_waits = True
        self._began: float | None = None
        self._depth = 0
        self._compile_started = self._collect_started = self._collecting = 0.0
        self._compile_range = ExitStack()
        self._clear()
        when_imported("torch._dynamo.callback", self._watch_compiler)

    def install(self) -> None:
        data = self._torch.utils.data
        self._patches.replace(data.dataloader._BaseDataLoaderIter, "__next__", self._next)
        self._patches.replace(data.DataLoader, "__iter__", self._iter)
        if self._on_gpu:
            torch = self._torch
            for name in ("to", "cuda"):
                self._patches.replace(torch.Tensor, name, self._move)
            self._patches.replace(torch.cuda, "empty_cache", self._counted)
            for name in _WAITS if self._times_waits else ():
                self._patches.replace(torch.Tensor, name, partial(self._wait, name))
            if self._times_waits:
                self._patches.replace(torch.cuda, "synchronize", partial(self._wait, "synchronize"))

    def time_waits(self, on: bool) -> None:
        """Whether each wait for the GPU is timed; a script may do some hundred in a step."""
        if on != self._times_waits:
            self._times_waits = on
            self._patches.undo()
            self.install()

    def adopt(self, on_gpu: bool) -> None:
        """The thread that calls this is the one that trains. Only now is a GPU's part installed: to ask earlier whether
        there is one would start the driver, which some scripts do later, or in children.
        """
        self.thread = threading.get_ident()
        self.in_another_thread = False
        self._on_gpu = on_gpu
        self._patches.undo()
        self.install()

    def forked(self) -> None:
        """This is a child that a fork made."""
        self._process = os.getpid()

    def remove(self) -> None:
        """Leave nothing behind."""
        self.active = False
        self._patches.undo()
        with suppress(ValueError):  # nothing of the compiler has been imported
            gc.callbacks.remove(self._collects)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Nothing is replaced meanwhile."""
        self._patches.undo()
        try:
            yield
        finally:
            self.install()

    def mark(self) -> StepTime | None:
        """End a step. None at the first call."""
        if self.on_mark:
            with self.on_mark():
                pass
        now = time.perf_counter()
        step = None
        if self._began is not None:
            compiling = self.compiling + (self._collecting if self.compiling else 0.0)
            step = StepTime(now - self._began, self.input, compiling, self.loads, self.regular)
        self._began = now
        self._clear()
        return step

    def drop_step(self) -> None:
        """What has gone by since the last mark is none of the script's."""
        self._began = None

    def seconds_a_call(self) -> float:
        """What timing one takes; measured now, in about 1 ms."""
        number, seen = 100, self.input
        started = time.perf_counter()
        for _ in range(number):
            with self._timed("input"):
                pass
        seconds = (time.perf_counter() - started) / number
        self.input = seen
        return seconds

    def seconds_a_wait(self) -> float:
        """What timing a wait takes; measured now, in about 0.5 ms."""
        number, seen = 200, self.sync

        def nothing(*_: object) -> None:
            pass

        wait = self._wait("own", nothing)
        seconds = []
        for call in (nothing, wait):
            started = time.perf_counter()
            for _ in range(number):
                call()
            seconds.append((time.perf_counter() - started) / number)
        self.sync = seen
        for line in [line for line in self.sync_lines if line.endswith(" own")]:
            del self.sync_lines[line]
        return max(0.0, seconds[1] - seconds[0])

    def _clear(self) -> None:
        self.input = self.sync = self.compiling = self._collecting = 0.0
        self.loads = 0
        self.calls_in_step = 0
        self.regular = True

    def _is_ours(self) -> bool:
        """Whether this is the training's thread, and not inside of something that is being timed."""
        return self.active and not self._depth and threading.get_ident() == self.thread and os.getpid() == self._process

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        self._depth += 1
        self.calls += 1
        started = time.perf_counter()
        try:
            with self.annotate(f"hotloop::{name}"):
                yield
        finally:
            self._depth -= 1
            setattr(self, name, getattr(self, name) + time.perf_counter() - started)

    def _iter(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def iterate(loader: Any) -> Any:
            if not self._is_ours():
                return original(loader)
            self.regular = False
            started = time.perf_counter()
            with self._timed("input"):
                iterator = original(loader)
            self.epoch_starts.append(started - time.perf_counter())  # until its first batch is there, see below
            return iterator

        return iterate

    def _next(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def next_batch(iterator: Any) -> Any:
            if not self._is_ours():
                self.in_another_thread |= self.active and not self._depth and os.getpid() == self._process
                return original(iterator)
            if self.loader() is not iterator:
                self.loader, self.loader_line = ref(iterator), script_line(sys._getframe(1))
            started = time.perf_counter()
            try:
                with self._timed("input"):
                    stand_in = self.stand_in
                    batch = stand_in(iterator, lambda: original(iterator)) if stand_in else original(iterator)
            except StopIteration:
                self.regular = False
                raise
            if self.epoch_starts and self.epoch_starts[-1] <= 0:
                self.epoch_starts[-1] = time.perf_counter() - started - self.epoch_starts[-1]
            self.loads += 1
            return batch

        return next_batch

    def _move(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def move(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if tensor.is_cuda or not self._is_ours():
                return original(tensor, *args, **kwargs)
            with self.annotate("hotloop::copy"):
                return original(tensor, *args, **kwargs)

        return move

    def _wait(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*args: Any, **kwargs: Any) -> Any:
            if (args and not getattr(args[0], "is_cuda", True)) or not self._is_ours():
                return original(*args, **kwargs)
            self._depth += 1  # all of it written out: a script may do this some hundred times a step
            self.calls += 1
            annotate = self.annotate
            started = clock()
            try:
                if annotate is unnamed:
                    return original(*args, **kwargs)
                with annotate("hotloop::sync"):
                    return original(*args, **kwargs)
            finally:
                took = clock() - started
                self._depth -= 1
                self.sync += took
                self.sync_lines[f"{places.of(frame(1))} {name}"] += took

        clock, frame, places = time.perf_counter, sys._getframe, self._places
        return wait

    def _counted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def empty_cache() -> None:
            self.empty_caches += 1
            original()

        return empty_cache

    def _watch_compiler(self, callback: Any) -> None:
        """torch.compile calls back where it begins and ends; older ones do not."""
        with suppress(AttributeError):
            callback.callback_handler.register_start_callback(self._compile_began)
            callback.callback_handler.register_end_callback(self._compile_ended)
            gc.callbacks.append(self._collects)

    def _compile_began(self, *_: object) -> None:
        self._compile_started = time.perf_counter()
        self._compile_range.enter_context(self.annotate("hotloop::compiling"))

    def _compile_ended(self, *_: object) -> None:
        self._compile_range.close()
        self.compiling += time.perf_counter() - self._compile_started
        self._compile_started = 0.0

    def _collects(self, phase: str, info: object) -> None:
        """Python's collector begins or ends: what compiling leaves is collected after it, too, 6 to 9 % of steps that
        each compile (bench/bottlenecks/recompilation.py, two cores).
        """
        if phase == "start":
            self._collect_started = time.perf_counter()
        elif not self._compile_started:
            self._collecting += time.perf_counter() - self._collect_started
