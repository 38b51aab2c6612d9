"""DataLoaders of a script: what waiting for them costs, and the same batches sooner."""

import atexit
import hashlib
import os
import pickle
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch.utils.data import DataLoader, dataloader

from hotloop.accelerate.lanes import How, IndexSource, Lane, OwnLane
from hotloop.accelerate.pace import Stock
from hotloop.attach.patches import Patches

_DIGESTED_BYTES = 2**25
"""Of a data set, pickled, that are compared from epoch to epoch: 0.05 s. Larger ones get new workers each time."""


class Passing(Protocol):
    """What becomes of batches on their way to the script."""

    def passed(self, loader: Any, batch: Any) -> None:
        """This one is on its way."""

    @property
    def is_ahead(self) -> bool:
        """Whether the next one is wanted early."""


class Loading:
    """Stands between the script and its DataLoaders. What it hands out comes in the order of the script's own sampler.

    Args:
        failed: told the error if batches come by our means no more.

    Attributes:
        how: batches are made; None: as the script says.
        passing: sees all batches; None: nobody does.
        waited: seconds in which the thread that trains waited for batches.
        worked: of those, seconds in which it was on a processor.
        batches: handed out by our means.
        taken: by the thread that trains, in all.
        samples: in those that it took while gradients were recorded, by their loaders' batch size.
        make_lane: of a loader, as is said.
        current: the pass that was asked last.
        numbers: of passes.
    """

    def __init__(self, failed: Callable[..., None]) -> None:
        self.how: Callable[[Any], How] | None = None
        self.make_lane: Callable[[Any, How, IndexSource, int], Any] = _lane
        self.passing: Passing | None = None
        self.failed = failed
        self.waited = self.worked = 0.0
        self.batches = self.taken = self.samples = 0
        self.current: Callable[[], Pass | None] = lambda: None
        self.numbers = count(1)
        self._thread = threading.get_ident()
        self._process = os.getpid()
        self._lanes: WeakKeyDictionary[Any, _Kept] = WeakKeyDictionary()
        self._drawn: WeakSet[Any] = WeakSet()
        self._passes: WeakSet[Pass] = WeakSet()
        self._patches = Patches()

    def install(self) -> None:
        self._patches.replace(DataLoader, "__iter__", self._iter)

    def remove(self) -> None:
        """The script's loaders are its own again, from their next pass on."""
        atexit.unregister(self.leave)
        self._patches.undo()
        for kept in self._lanes.values():
            kept.lane.end()
        self._lanes.clear()

    def leave(self) -> None:
        """The process ends."""
        if os.getpid() != self._process:
            return
        self._patches.undo()
        for kept in self._lanes.values():
            kept.lane.leave()
        for each in list(self._passes):
            each.leave()
        self._lanes.clear()

    def adopt(self) -> None:
        """The thread that calls this is the one that trains, in this process."""
        self._thread = threading.get_ident()
        self._process = os.getpid()

    @property
    def is_ours(self) -> bool:
        """Whether this is the thread that trains."""
        return threading.get_ident() == self._thread and os.getpid() == self._process

    def stock(self) -> Stock:
        """Of the pass that was asked last."""
        current = self.current()
        return replace(current.stock, taken=self.taken) if current else Stock()

    def set_how(self, how: Callable[[Any], How] | None) -> None:
        """Make batches in another way from now on, those of passes that are under way too.

        Raises:
            Exception: that cannot be done; then it stays as it was.
        """
        before, self.how = self.how, how
        try:
            for each in list(self._passes):
                each.change()
        except BaseException:
            self.how = before
            raise

    def _iter(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def iterate(loader: Any) -> Any:
            known = type(loader)._get_iterator is DataLoader._get_iterator  # else it is another one's business
            indexed = loader._dataset_kind == dataloader._DatasetKind.Map and loader.in_order
            if not self.is_ours or not known or not indexed:
                return original(loader)
            started = time.perf_counter()
            found = self._pass(loader, original)
            self.waited += time.perf_counter() - started
            self._passes.add(found)
            self.current = ref(found)
            return found

        return iterate

    def _pass(self, loader: Any, original: Callable[..., Any]) -> "Pass":
        if not self.how:
            self._drawn.add(loader)
            return Pass(self, loader, OwnLane(loader, original(loader)))
        # The same draws in the same order as torch's own iterators.
        indices, seed = iter(loader._index_sampler), 0
        persistent = loader.persistent_workers and loader.num_workers
        if not (persistent and (loader._iterator or loader in self._drawn)):
            seed = int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator))
            if loader.num_workers:
                indices = iter(loader._index_sampler)
        self._drawn.add(loader)
        found = Pass(self, loader, None, IndexSource(indices, loader), seed)
        if loader.num_workers:
            found.begin()
        return found  # without workers a loader asks its sampler when it is asked for a batch

    def lane(self, user: "Pass", source: IndexSource, seed: int) -> Any:
        """A lane of the present settings; the one that was left by an earlier pass, if nothing has changed since."""
        assert self.how
        loader, how = user.loader, self.how(user.loader)
        kept, digest = self._lanes.get(loader), _digest(loader)
        if digest is None and not loader.num_workers:  # it holds an open file, say, which processes cannot share
            how = replace(how, workers=0)
        if kept and kept.user() is None:
            if digest and (kept.digest, kept.how) == (digest, how) and _may_stay(loader):
                kept.user = ref(user)
                kept.lane.restart(source)
                return kept.lane
            kept.lane.end()
            self.drop(loader)
        lane = self.make_lane(loader, how, source, seed)
        atexit.unregister(self.leave)
        atexit.register(self.leave)  # what is registered last is called first: before torch waits for the workers
        if not kept or kept.user() in (None, user):  # else two passes of one loader are under way at once
            self._lanes[loader] = _Kept(lane, how, digest or "", ref(user))
        return lane

    def seen(self, loader: Any, batch: Any) -> None:
        """A batch is on its way; whatever becomes of what is done with it, the script gets it."""
        assert self.passing
        try:
            self.passing.passed(loader, batch)
        except Exception as error:  # out of memory, say
            self.passing = None
            self.failed(_words(error), "prefetch")

    def drop(self, loader: Any) -> None:
        """A lane of it has broken, or has ended."""
        self._lanes.pop(loader, None)


def _lane(loader: Any, how: How, source: IndexSource, seed: int) -> Lane:
    return Lane(loader, loader.dataset, how, source, seed)


class _Kept:
    """A lane between passes.

    Attributes:
        user: the pass that it serves; gives None once that has gone.
    """

    def __init__(self, lane: Any, how: How, digest: str, user: Callable[[], "Pass | None"]) -> None:
        self.lane = lane
        self.how = how
        self.digest = digest
        self.user = user


class Pass:
    """One pass over a loader, as the script iterates over it; from another thread too."""

    def __init__(
        self, loading: Loading, loader: Any, lane: OwnLane | None, source: IndexSource | None = None, seed: int = 0
    ) -> None:
        self.loader = loader
        self.lane: Any = lane
        self._loading = loading
        self._source: Any = lane.source if lane else source
        self._seed = lane.seed if lane else seed
        self._next_lane: Any = None
        self._blamed: Exception | None = None
        self._ahead: deque[Any] = deque()
        self._ended = False
        self._lock = threading.RLock()
        self._number = next(loading.numbers)

    def begin(self) -> None:
        """Start making batches; as the script would, if that is all that works."""
        try:
            self.lane = self._loading.lane(self, self._source, self._seed)
        except Exception as error:
            self.lane = self._own_lane()
            self._loading.failed(_words(error))

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self.loader._index_sampler)

    def __getattr__(self, name: str) -> Any:
        if not self.lane:
            self.begin()
        return getattr(self.lane.iterator, name)

    def __next__(self) -> Any:
        loading, started, worked = self._loading, time.perf_counter(), time.thread_time()
        if loading.is_ours:
            loading.current = ref(self)
        try:
            with self._lock:
                self._source.asked()
                batch = self._ahead.popleft() if self._ahead else self._take()
                if isinstance(batch, _Raised):
                    raise batch.error
                if loading.is_ours:
                    loading.taken += 1
                    loading.samples += (self.loader.batch_size or 0) if torch.is_grad_enabled() else 0
                passing = loading.passing
                if passing and passing.is_ahead and not self._ended and self.lane.is_ready:
                    self._look_ahead()
        finally:
            if loading.is_ours:
                loading.waited += time.perf_counter() - started
                loading.worked += time.thread_time() - worked
        return batch

    def _look_ahead(self) -> None:
        try:
            self._ahead.append(self._take())
        except Exception as error:  # raised when its turn has come
            self._ahead.append(_Raised(error))

    @property
    def stock(self) -> Stock:
        """Its batches now, those of the lane that comes next too."""
        lanes = [lane.stock for lane in (self.lane, self._next_lane) if lane]
        ready, under_way, workers = (
            sum(getattr(one, name) for one in lanes) for name in ("ready", "under_way", "workers")
        )
        return Stock(len(self._ahead) + ready, under_way, workers=workers, number=self._number)

    def change(self) -> None:
        """Go on as is set now; what is under way comes first.

        Raises:
            Exception: that cannot be done; then it goes on as before.
        """
        with self._lock:
            if self._ended or not self.lane:
                return
            if self._next_lane:  # it has not begun yet
                self._next_lane.abandon(self._source)
                self._next_lane = None
            loading = self._loading
            following = loading.lane(self, self._source, self._seed) if loading.how else self._own_lane()
            self.lane.close()
            self._next_lane = following

    def leave(self) -> None:
        """The process ends."""
        for lane in (self.lane, self._next_lane):
            if lane and not lane.is_own:
                lane.leave()

    def _take(self) -> Any:
        if self._ended:
            raise StopIteration
        if not self.lane:
            self.begin()
        try:
            batch = self._of_lane()
        except StopIteration:
            self._ended = True
            raise
        if self._loading.passing:
            self._loading.seen(self.loader, batch)
        return batch

    def _of_lane(self) -> Any:
        while True:
            try:
                batch = self.lane.next()
            except StopIteration:
                if not self._next_lane:
                    raise
                self.lane.end()
                self.lane, self._next_lane = self._next_lane, None
                continue
            except Exception as error:
                if self.lane.is_own:
                    self._blamed = None  # it is the script's own
                    raise
                self._fall_back(error)
                continue
            self._loading.batches += not self.lane.is_own
            if self._blamed:  # the script's own way has not raised it
                blamed, self._blamed = self._blamed, None
                self._loading.failed(_words(blamed))
            return batch

    def _fall_back(self, error: Exception) -> None:
        """Make the batches that did not come as the script would have. If the error is its own, it comes again now."""
        if self._next_lane:
            self._next_lane.abandon(self._source)
            self._next_lane = None
        self.lane.abandon(self._source)
        self._loading.drop(self.loader)
        self.lane = self._own_lane()
        self._blamed = error

    def _own_lane(self) -> Lane:
        loader = self.loader
        how = How(loader.num_workers, loader.prefetch_factor or 2, loader.pin_memory)
        return Lane(loader, loader.dataset, how, self._source, self._seed, is_own=True)


class _Raised:
    """In place of a batch."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def _words(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"


def _may_stay(loader: Any) -> bool:
    """Whether workers may go on into the next pass: the script asked for it, or what they run is no code of its own,
    whose globals it may have changed since.
    """
    parts = (type(loader.dataset), loader.collate_fn, loader.worker_init_fn)
    modules = [sys.modules.get(getattr(part, "__module__", ""), None) for part in parts if part is not None]
    return loader.persistent_workers or all("-packages" in (getattr(one, "__file__", "") or "") for one in modules)


def _digest(loader: Any) -> str | None:
    """Of what workers are given; another one if the script has changed it. Empty if that is too much to be compared,
    None if it cannot be pickled.
    """
    found = _Digest()
    try:
        _Pickler(found).dump((loader.dataset, loader.collate_fn, loader.worker_init_fn))
    except _TooLarge:
        return ""
    except Exception:  # whatever a data set raises when it is pickled
        return None
    return found.hash.hexdigest()


class _TooLarge(Exception):
    """More than is compared."""


class _Pickler(pickle.Pickler):
    def __init__(self, to: "_Digest") -> None:
        super().__init__(to, pickle.HIGHEST_PROTOCOL)
        self._to = to

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.nbytes > self._to.room:  # it would be copied first
            raise _TooLarge
        return NotImplemented


class _Digest:
    """A file of which only the hash is kept."""

    def __init__(self) -> None:
        self.hash = hashlib.blake2b()
        self.room = _DIGESTED_BYTES

    def write(self, content: Any) -> None:
        self.room -= memoryview(content).nbytes
        if self.room < 0:
            raise _TooLarge
        self.hash.update(content)
