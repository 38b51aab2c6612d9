"""DataLoaders of a script: what waiting for them costs, and the same batches sooner."""

import hashlib
import os
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol
from weakref import WeakKeyDictionary, ref

import torch
from torch.utils.data import DataLoader, dataloader

from hotloop.accelerate.lanes import How, IndexSource, Lane, OwnLane
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
        current: the pass that was asked last.
    """

    def __init__(self, failed: Callable[[str], None]) -> None:
        self.how: Callable[[Any], How] | None = None
        self.dataset_of: Callable[[Any, How], Any] = lambda dataset, how: dataset
        self.passing: Passing | None = None
        self.failed = failed
        self.waited = self.worked = 0.0
        self.batches = 0
        self.current: Callable[[], Pass | None] = lambda: None
        self._thread = threading.get_ident()
        self._process = os.getpid()
        self._lanes: WeakKeyDictionary[Any, _Kept] = WeakKeyDictionary()
        self._patches = Patches()

    def install(self) -> None:
        self._patches.replace(DataLoader, "__iter__", self._iter)

    def remove(self) -> None:
        """The script's loaders are its own again, from their next pass on."""
        self._patches.undo()
        for kept in self._lanes.values():
            kept.lane.end()
        self._lanes.clear()

    def adopt(self) -> None:
        """The thread that calls this is the one that trains."""
        self._thread = threading.get_ident()

    def set_how(self, how: Callable[[Any], How] | None) -> None:
        """Make batches in another way from now on, those of the pass that is under way too."""
        self.how = how
        current = self.current()
        if current:
            current.change()

    def _iter(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def iterate(loader: Any) -> Any:
            ours = threading.get_ident() == self._thread and os.getpid() == self._process
            if not ours or loader._dataset_kind != dataloader._DatasetKind.Map or not loader.in_order:
                return original(loader)
            started = time.perf_counter()
            found = self._pass(loader, original)
            self.waited += time.perf_counter() - started
            self.current = ref(found)
            return found

        return iterate

    def _pass(self, loader: Any, original: Callable[..., Any]) -> "Pass":
        if not self.how:
            return Pass(self, loader, OwnLane(original(loader)))
        seed = 0
        if not (loader.persistent_workers and loader._iterator):  # the script's own would draw it
            seed = int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator))
        source = IndexSource(iter(loader._index_sampler))
        found = Pass(self, loader, None, source, seed)
        found.lane = self.lane(found, source, seed)
        return found

    def lane(self, user: "Pass", source: IndexSource, seed: int) -> Lane:
        """A lane of the present settings; the one that was left by an earlier pass, if nothing has changed since."""
        assert self.how
        loader, how = user.loader, self.how(user.loader)
        kept, digest = self._lanes.get(loader), _digest(loader)
        if kept and kept.user() is None:
            if digest and (kept.digest, kept.how) == (digest, how):
                kept.user = ref(user)
                kept.lane.restart(source)
                return kept.lane
            kept.lane.end()
        lane = Lane(loader, self.dataset_of(loader.dataset, how), how, source, seed)
        if not kept or kept.user() in (None, user):  # else two passes of one loader are under way at once
            self._lanes[loader] = _Kept(lane, how, digest, ref(user))
        return lane

    def drop(self, loader: Any) -> None:
        """A lane of it has broken."""
        self._lanes.pop(loader, None)


class _Kept:
    """A lane between passes.

    Attributes:
        user: the pass that it serves; gives None once that has gone.
    """

    def __init__(self, lane: Lane, how: How, digest: str, user: Callable[[], "Pass | None"]) -> None:
        self.lane = lane
        self.how = how
        self.digest = digest
        self.user = user


class Pass:
    """One pass over a loader, as the script iterates over it."""

    def __init__(
        self, loading: Loading, loader: Any, lane: OwnLane | Lane | None, source: IndexSource | None = None,
        seed: int = 0,
    ) -> None:  # fmt: skip
        self.loader = loader
        self.lane: Any = lane
        self._loading = loading
        self._source: Any = lane.source if isinstance(lane, OwnLane) else source
        self._seed = lane.seed if isinstance(lane, OwnLane) else seed
        self._next_lane: Any = None
        self._blamed: Exception | None = None
        self._ahead: deque[Any] = deque()
        self._ended = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self.loader._index_sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lane.iterator, name)

    def __next__(self) -> Any:
        loading, started, worked = self._loading, time.perf_counter(), time.thread_time()
        try:
            batch = self._ahead.popleft() if self._ahead else self._take()
            passing = loading.passing
            if passing and passing.is_ahead and not self._ended and self.lane.is_ready:
                self._look_ahead()
        finally:
            loading.waited += time.perf_counter() - started
            loading.worked += time.thread_time() - worked
        return batch

    def _look_ahead(self) -> None:
        try:
            self._ahead.append(self._take())
        except StopIteration:
            self._ended = True

    def change(self) -> None:
        """Go on as is set now; what is under way comes first."""
        if self._ended:
            return
        self.lane.close()
        if self._next_lane:  # it has not begun yet
            self._next_lane.abandon(self._source)
        loading = self._loading
        self._next_lane = loading.lane(self, self._source, self._seed) if loading.how else self._own_lane()

    def _take(self) -> Any:
        if self._ended:
            raise StopIteration
        try:
            batch = self._of_lane()
        except StopIteration:
            self._ended = True
            raise
        if self._loading.passing:
            self._loading.passing.passed(self.loader, batch)
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
                    raise
                self._fall_back(error)
                continue
            self._loading.batches += not self.lane.is_own
            if self._blamed:  # the script's own way has not raised it
                self._loading.failed(f"{type(self._blamed).__name__}: {self._blamed}")
                self._blamed = None
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


def _digest(loader: Any) -> str:
    """Of what workers are given; another one if the script has changed it. Empty if that cannot be told."""
    found = _Digest()
    try:
        pickle.Pickler(found, pickle.HIGHEST_PROTOCOL).dump((loader.dataset, loader.collate_fn, loader.worker_init_fn))
    except Exception:  # whatever a data set raises when it is pickled
        return ""
    return found.hash.hexdigest()


class _Digest:
    """A file of which only the hash is kept."""

    def __init__(self) -> None:
        self.hash = hashlib.blake2b()
        self._room = _DIGESTED_BYTES

    def write(self, content: Any) -> None:
        self._room -= memoryview(content).nbytes
        if self._room < 0:
            raise ValueError("too large to be compared")
        self.hash.update(content)
