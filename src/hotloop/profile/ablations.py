"""Parts of a step left out while its time is taken: what they cost is measured, not guessed.

What is computed meanwhile is of no use: a script goes on with it only to be timed, and is ended afterwards.
"""

import copy
import os
import sys
import time
from collections import UserDict, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from multiprocessing import get_start_method
from types import SimpleNamespace
from typing import Any

from hotloop.attach.malloc import keep_freed
from hotloop.attach.patches import replaced
from hotloop.profile.hooks import Hooks
from hotloop.profile.lines import Places

_KEPT = 4
"""Batches of a loader that are given again and again; samples that batches are made of."""
_ENOUGH = 100_000
"""Of those, for any number of steps."""
_TORCH = "/torch/"
_CALLS = 200
"""By which it is measured what a stand-in for a read takes."""


class Ablations:
    """Conditions to time steps under.

    Args:
        hooks: that watch the script.

    Attributes:
        reading_seconds: that giving values again has taken, the calls themselves included.
    """

    def __init__(self, torch: Any, hooks: Hooks) -> None:
        self._torch = torch
        self._hooks = hooks
        self.reading_seconds = 0.0
        self._unseen_seconds = 0.0
        self._kept: list[_Kept] = []

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Keep each loader's last batches."""

        def keep(iterator: Any, original: Callable[[], Any]) -> Any:
            batch = original()
            kept = self._kept_of(iterator._dataset, same=True)
            if not kept:
                kept = _Kept(iterator._dataset, _kind(iterator))
                self._kept.append(kept)
            kept.batches.append(batch)
            return batch

        with self._stand_in(keep):
            yield

    @contextmanager
    def cached_batches(self) -> Iterator[None]:
        """Loaders give batches that they have given before, as many as they have left; their workers fill what they
        have room for, and rest. Loaders that have not been seen give their own.
        """
        with self._stand_in(partial(self._again, lambda kept, iterator: kept.next())):
            yield

    @contextmanager
    def cached_samples(self) -> Iterator[None]:
        """The same, but workers make them of samples that are there: what is left of loading is to collate and to send
        them. Loaders whose workers cannot be started once more give batches as they are.
        """
        loaders: dict[int, Any] = {}

        def made(kept: _Kept, iterator: Any) -> Any:
            if id(kept) not in loaders:
                loaders[id(kept)] = self._of_samples(iterator)
            loader = loaders[id(kept)]
            return next(loader) if loader else kept.next()

        with self._stand_in(partial(self._again, made)):
            try:
                yield
            finally:
                for loader in filter(None, loaders.values()):
                    loader._shutdown_workers()

    def _again(self, give: Callable[["_Kept", Any], Any], iterator: Any, original: Callable[[], Any]) -> Any:
        kept = self._kept_of(iterator._dataset, same=True) or self._kept_of(_kind(iterator), same=False)
        if not kept:
            return original()
        with suppress(TypeError):  # an iterable without a length
            if iterator._num_yielded >= len(iterator):
                raise StopIteration
        iterator._num_yielded += 1  # the iterator's own: with persistent workers it serves all epochs
        return give(kept, iterator)

    def _of_samples(self, iterator: Any) -> Any:
        """An iterator like one with workers, of some samples of its data set; None if such a one cannot be made."""
        try:
            if not are_forked(iterator):  # they take seconds to start
                return None
            samples = [iterator._dataset[index] for index in range(_KEPT)]
            batch = [number % _KEPT for number in range(iterator._index_sampler.batch_size)]
            return iter(
                self._torch.utils.data.DataLoader(
                    samples, batch_sampler=[batch] * _ENOUGH, num_workers=iterator._num_workers,
                    collate_fn=iterator._collate_fn, pin_memory=iterator._pin_memory,
                    prefetch_factor=iterator._prefetch_factor, worker_init_fn=iterator._worker_init_fn,
                )
            )  # fmt: skip
        except Exception:  # whatever the script's data set has against being asked here
            return None

    def _kept_of(self, what: Any, same: bool) -> "_Kept | None":
        """Of this data set; or of one made like it, for scripts that make theirs anew for each epoch."""
        found = [kept for kept in self._kept if (kept.dataset is what if same else kept.kind == what)]
        return found[-1] if found else None

    @contextmanager
    def _stand_in(self, give: Callable[[Any, Callable[[], Any]], Any]) -> Iterator[None]:
        self._hooks.stand_in = give
        try:
            yield
        finally:
            self._hooks.stand_in = None

    @property
    def has_batches(self) -> bool:
        """Whether there is anything to give again."""
        return bool(self._kept)

    def forget(self) -> None:
        """Let go of all batches."""
        self._kept.clear()

    @contextmanager
    def batches_on_device(self) -> Iterator[None]:
        """The same, and what the script copies of them to a GPU has been there since the first time."""
        cached = {id(tensor) for kept in self._kept for tensor in self._tensors(list(kept.batches))}
        moved: dict[tuple[int, str], Any] = {}

        def remembered(original: Callable[..., Any]) -> Callable[..., Any]:
            def move(tensor: Any, *args: Any, **kwargs: Any) -> Any:
                if id(tensor) not in cached or any(isinstance(each, self._torch.Tensor) for each in args):
                    return original(tensor, *args, **kwargs)
                key = (id(tensor), repr((args, kwargs)))
                if key not in moved:
                    moved[key] = original(tensor, *args, **kwargs)
                return moved[key]

            return move

        with replaced((self._torch.Tensor, name, remembered) for name in ("to", "cuda")), self.cached_batches():
            yield

    @contextmanager
    def without_waits(self) -> Iterator[None]:
        """With batches given again, values that a line has once read from a GPU are what it reads in every step;
        nothing is waited for.

        Decisions on tensors (`if tensor:`) and what torch itself reads, for loss scaling say, are read anew: another
        outcome would be another training.
        """
        values: dict[tuple[Any, ...], Any] = {}
        calls: dict[tuple[Any, ...], int] = {}
        places, clock = Places(), time.perf_counter

        def remembered(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
            def read(tensor: Any, *args: Any, **kwargs: Any) -> Any:
                started, caller = clock(), sys._getframe(1)
                if not tensor.is_cuda or _TORCH in caller.f_code.co_filename:
                    return original(tensor, *args, **kwargs)
                if not self._hooks.calls_in_step:
                    calls.clear()
                self._hooks.calls_in_step += 1
                line = (places.of(caller), name, tensor.shape)
                number = calls[line] = calls.get(line, 0) + 1
                key = (line, number)
                if key not in values:
                    values[key] = original(tensor, *args, **kwargs)
                    started = clock()
                value = values[key]
                given = value if isinstance(value, int | float) else copy.deepcopy(value)
                self.reading_seconds += clock() - started + self._unseen_seconds
                return given

            return read

        def nothing(original: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args, **kwargs: None

        self._calibrate(remembered("own", lambda tensor: 0.0))
        with ExitStack() as stack:
            for name in ("item", "cpu", "tolist", "__float__", "__int__"):
                stack.enter_context(replaced([(self._torch.Tensor, name, partial(remembered, name))]))
            stack.enter_context(replaced([(self._torch.cuda, "synchronize", nothing)]))
            stack.enter_context(self.cached_batches())
            yield

    def _calibrate(self, read: Callable[[Any], Any]) -> None:
        """Measure what a call of a stand-in takes besides what it sees of itself: a script without the read does not
        call. Takes about 1 ms.
        """
        tensor, before, self._unseen_seconds = SimpleNamespace(is_cuda=True, shape=()), self.reading_seconds, 0.0
        for _ in ("values are read", "values are given again"):  # the last one counts
            self._hooks.calls_in_step, self.reading_seconds = 0, 0.0
            started = time.perf_counter()
            for _ in repeat(None, _CALLS):
                read(tensor)
            took = time.perf_counter() - started
        self._unseen_seconds = (took - self.reading_seconds) / _CALLS
        self._hooks.calls_in_step, self.reading_seconds = 0, before

    def _tensors(self, batch: Any) -> Iterator[Any]:
        if isinstance(batch, self._torch.Tensor):
            yield batch
        elif isinstance(batch, Mapping):
            for value in batch.values():
                yield from self._tensors(value)
        elif isinstance(batch, list | tuple):
            for value in batch:
                yield from self._tensors(value)

    @contextmanager
    def without_empty_cache(self) -> Iterator[None]:
        """What the allocator holds stays its own."""

        def nothing(original: Callable[..., None]) -> Callable[..., None]:
            return lambda: None

        with replaced([(self._torch.cuda, "empty_cache", nothing)]):
            yield

    @contextmanager
    def kept_memory(self) -> Iterator[None]:
        """What a step frees stays with the process."""
        keep_freed(True)
        try:
            yield
        finally:
            keep_freed(False)

    @contextmanager
    def fewer_threads(self) -> Iterator[None]:
        """As many threads of torch's as this process has processors."""
        before = self._torch.get_num_threads()
        self._torch.set_num_threads(len(os.sched_getaffinity(0)))
        try:
            yield
        finally:
            self._torch.set_num_threads(before)


@dataclass
class _Kept:
    """Batches of one data set.

    Attributes:
        kind: what a data set made like it has in common with it.
    """

    dataset: Any
    kind: tuple[type, int | None]
    batches: deque[Any] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def next(self) -> Any:
        """One that has been given before."""
        self.batches.rotate(-1)
        return _same_containers(self.batches[-1])


def _kind(iterator: Any) -> tuple[type, int | None]:
    try:
        return type(iterator._dataset), len(iterator)
    except TypeError:  # an iterable without a length
        return type(iterator._dataset), None


def _same_containers(batch: Any) -> Any:
    """The batch in lists and dicts of its own, as scripts take things out of them."""
    if isinstance(batch, MutableMapping):
        fresh = copy.copy(batch)
        if isinstance(batch, UserDict) and isinstance(fresh, UserDict):  # whose copy shares what it holds
            fresh.data = dict(batch.data)
        for key, value in batch.items():
            fresh[key] = _same_containers(value)
        return fresh
    if type(batch) in (list, tuple):
        return type(batch)(_same_containers(value) for value in batch)
    return batch


def are_forked(iterator: Any) -> bool:
    """Whether a loader's workers are, or would be, started by a fork."""
    workers = getattr(iterator, "_workers", ())
    asked = workers[0]._start_method if workers else None
    return (asked or get_start_method(allow_none=True) or "fork") == "fork"
