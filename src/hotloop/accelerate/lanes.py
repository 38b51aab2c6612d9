"""The batches of one pass over a DataLoader by other means, changed in its middle without losing or doubling any."""

import copy
import multiprocessing
import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from math import inf
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler, dataloader

from hotloop.accelerate.pace import Stock
from hotloop.data.worker import NICE

_PATIENCE_SECONDS = 120.0
"""After which a batch that has not come is made as the script would have made it: one that cannot be sent from process
to process never comes, and nothing says so.
"""
_LEAVE_SECONDS = 3.0
"""For all workers together: each ends the batch that it is at."""


@dataclass(frozen=True)
class How:
    """How a loader's batches are made.

    Attributes:
        workers: processes.
        prefetch_factor: batches that each has under way.
        pin_memory: whether batches come in page-locked memory.
        images: whether an ImageFolder's images are read by our own decoder.
        device: the GPU where these are cut and scaled; None: that is done by the workers.
    """

    workers: int
    prefetch_factor: int
    pin_memory: bool
    images: bool = False
    device: torch.device | None = None


class IndexSource:
    """The index batches of one pass, as the loader's own sampler gives them. What that raises, the end too, is raised
    from then on: it is not asked again.

    What torch's sampler draws at its end, from a generator of the script's perhaps, is drawn when torch itself would
    have asked for it, however far ahead a lane asks.

    Args:
        taken: by torch, before.
    """

    def __init__(self, indices: Iterator[Any], loader: Any, taken: int = 0) -> None:
        self._indices = indices
        self._left = self._until_end = inf
        self._back: deque[Any] = deque()
        self._ended = False
        self._error: Exception | None = None
        batches = loader._index_sampler
        sampler = batches.sampler if type(batches) is BatchSampler else batches
        if type(sampler) is RandomSampler:
            ends_with_last = False
            if sampler is not batches:
                ends_with_last = not batches.drop_last and len(sampler) % batches.batch_size > 0
                self._indices = indices if taken else _index_batches(batches)
            self._left = len(batches) - taken
            self._until_end = len(batches) + (not ends_with_last) - asked_ahead(loader)
        self._end_if_due()

    def __next__(self) -> Any:
        if self._back:
            return self._back.popleft()
        if self._error:
            raise self._error
        if self._ended or self._left <= 0:
            raise StopIteration
        try:
            self._left -= 1
            return next(self._indices)
        except StopIteration:  # itself it would keep alive whoever has asked
            self._ended = True
            raise
        except Exception as error:
            self._error = error
            raise

    def give_back(self, indices: "deque[Any]") -> None:
        """They come again next, in their order."""
        self._back.extendleft(reversed(indices))

    def asked(self) -> None:
        """The script asks for one more batch."""
        self._until_end -= 1
        self._end_if_due()

    def _end_if_due(self) -> None:
        if self._until_end <= 0 and not self._ended:
            self._back.extend(self._indices)
            self._ended = True


def asked_ahead(loader: Any) -> int:
    """Index batches that torch's own iterator asks for before the script asks for the first batch."""
    return int(loader.num_workers) * (loader.prefetch_factor or 0)


def _index_batches(batches: BatchSampler) -> Iterator[list[int]]:
    """Its batches. It would itself ask the sampler for its end while it makes a last one that is smaller."""
    indices, left = iter(batches.sampler), len(batches.sampler)  # type: ignore[arg-type]
    for _ in range(len(batches)):
        yield list(islice(indices, min(left, batches.batch_size)))
        left -= batches.batch_size
    deque(indices, maxlen=0)


class LaneIndices:
    """What one lane takes from the source.

    Attributes:
        under_way: taken, and not delivered as a batch yet.
        closed: whether the lane gets no more.
    """

    def __init__(self, source: IndexSource) -> None:
        self._source = source
        self.under_way: deque[Any] = deque()
        self.closed = False

    def restart(self, source: IndexSource) -> None:
        """For another pass."""
        self._source = source
        self.under_way.clear()
        self.closed = False

    def __iter__(self) -> "LaneIndices":
        return self

    def __next__(self) -> Any:
        if self.closed:
            raise StopIteration
        self.under_way.append(next(self._source))
        return self.under_way[-1]


class LaneOfIndices(ABC):
    """What makes batches of the indices that it takes from a source."""

    _indices: LaneIndices

    def close(self) -> None:
        """It takes no more indices, and delivers what is under way."""
        self._indices.closed = True

    def abandon(self, source: IndexSource) -> None:
        """What it has not delivered goes back to the source; its workers end."""
        source.give_back(self._indices.under_way)
        self.end()

    @abstractmethod
    def end(self) -> None:
        """Its workers end."""


class OwnLane(LaneOfIndices):
    """The iterator that the DataLoader made itself."""

    is_own = True

    def __init__(self, loader: Any, iterator: Any) -> None:
        self.iterator = iterator
        self.seed: int = iterator._base_seed
        self.source = IndexSource(iterator._sampler_iter, loader, taken=asked_ahead(loader))
        self._indices = iterator._sampler_iter = LaneIndices(self.source)

    def next(self) -> Any:
        batch = next(self.iterator)
        if self._indices.under_way:  # those from before we came are not in it
            self._indices.under_way.popleft()
        return batch

    def end(self) -> None:
        """The script may want it again."""

    @property
    def is_ready(self) -> bool:
        return _is_ready(self.iterator)

    @property
    def stock(self) -> Stock:
        return _stock(self.iterator)


class Lane(LaneOfIndices):
    """Batches of a loader with other settings than its own.

    Args:
        dataset: in place of the loader's own.
        seed: of the random numbers that its workers draw; the script's own generators are left as they are.
        is_own: whether the settings are those of the script after all.
    """

    def __init__(
        self, loader: Any, dataset: Any, how: How, source: IndexSource, seed: int, is_own: bool = False
    ) -> None:
        self.is_own = is_own
        self._indices = LaneIndices(source)
        self._loader = _clone(loader, dataset, how, self._indices)
        if how.workers and not is_own:
            _beside_ours(loader, self._loader)
        self._loader.generator = torch.Generator().manual_seed(seed)  # it draws the workers' seeds
        multi = dataloader._MultiProcessingDataLoaderIter if how.workers else dataloader._SingleProcessDataLoaderIter
        self.iterator: Any
        try:
            self.iterator = multi(self._loader)
        except BaseException:  # no process could be started
            source.give_back(self._indices.under_way)
            raise
        if how.workers and not is_own:
            # A worker's death is found where its batch is awaited; torch would raise it anywhere in the script.
            torch._C._remove_worker_pids(id(self.iterator))
            self.iterator._worker_pids_set = False

    def restart(self, source: IndexSource) -> None:
        """Another pass with the same workers."""
        self._indices.restart(source)
        self.iterator._reset(self._loader)

    def next(self) -> Any:
        batch = next(self.iterator)
        self._indices.under_way.popleft()
        return batch

    def end(self) -> None:
        """Its workers end."""
        if isinstance(self.iterator, dataloader._MultiProcessingDataLoaderIter):
            self.iterator._shutdown_workers()

    def leave(self) -> None:
        """The process ends. Torch's own way to end workers wants a new thread, where Python 3.12 hangs by then
        (https://github.com/python/cpython/issues/104690); and of those that are kept and give page-locked batches it
        waits five seconds for each, at exit. So they are told, and those that have not ended soon are ended.
        """
        if not isinstance(self.iterator, dataloader._MultiProcessingDataLoaderIter) or self.iterator._shutdown:
            return
        self.iterator._shutdown = True  # torch finds it done
        until = time.monotonic() + _LEAVE_SECONDS
        if self.iterator._pin_memory:  # it takes batches from where a worker that has ended has them no more
            self.iterator._pin_memory_thread_done_event.set()
            _wake(self.iterator._worker_result_queue)
            self.iterator._pin_memory_thread.join(_LEAVE_SECONDS)
        self.iterator._workers_done_event.set()
        for queue in self.iterator._index_queues:
            if getattr(queue, "_thread", None) is not None:  # `put` would start one
                queue.put(None)
        for worker in self.iterator._workers:
            worker.join(max(0.0, until - time.monotonic()))
            worker.terminate()

    @property
    def is_ready(self) -> bool:
        """Whether its next batch would come at once."""
        return _is_ready(self.iterator)

    @property
    def stock(self) -> Stock:
        """Its batches now."""
        return _stock(self.iterator)


def _is_ready(iterator: Any) -> bool:
    if not isinstance(iterator, dataloader._MultiProcessingDataLoaderIter):
        return False
    arrived = iterator._task_info.get(iterator._rcvd_idx)
    return (arrived is not None and len(arrived) == 2) or not iterator._data_queue.empty()


def _stock(iterator: Any) -> Stock:
    if not isinstance(iterator, dataloader._MultiProcessingDataLoaderIter):
        return Stock()
    ready = iterator._data_queue.qsize() + sum(len(task) == 2 for task in iterator._task_info.values())
    if iterator._pin_memory:  # else it is the same queue
        ready += iterator._worker_result_queue.qsize()
    return Stock(ready, max(0, len(iterator._task_info) - ready), workers=len(iterator._workers))


def _wake(queue: Any) -> None:
    """Have its reader look whether it is to end, if it waits. One that has something to read, or that a worker is
    sending something, does not; and a worker that was killed may hold the lock for ever. `put` would start a thread.
    """
    if queue.empty() and queue._wlock.acquire(block=False):
        try:
            queue._sem.acquire(block=False)  # of messages: the reader gives back one for each
            queue._writer.send_bytes(ForkingPickler.dumps((None, None)))
        finally:
            queue._wlock.release()


def _clone(loader: Any, dataset: Any, how: How, indices: LaneIndices) -> Any:
    """The same loader with other settings; it forbids changing some of them by their names."""
    clone = copy.copy(loader)
    own = vars(clone)
    own.update(dataset=dataset, num_workers=how.workers, pin_memory=how.pin_memory, _iterator=None)
    own.update(persistent_workers=bool(how.workers), prefetch_factor=how.prefetch_factor if how.workers else None)
    own["sampler" if loader.batch_sampler is None else "batch_sampler"] = indices
    return clone


def _beside_ours(loader: Any, clone: Any) -> None:
    """For workers that the script did not ask for."""
    own = vars(clone)
    own["worker_init_fn"] = _Considerate(loader.worker_init_fn)
    own["timeout"] = loader.timeout or _PATIENCE_SECONDS
    if loader.multiprocessing_context is None:  # any other way would import the script once more in each of them
        own["_DataLoader__multiprocessing_context"] = multiprocessing.get_context("fork")


class _Considerate:
    """Makes way for the process that trains."""

    def __init__(self, then: Any) -> None:
        self._then = then

    def __call__(self, worker: int) -> None:
        os.nice(NICE)
        if self._then:
            self._then(worker)
