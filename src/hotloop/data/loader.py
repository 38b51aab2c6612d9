"""Batches of a data set in a known order, filled ahead of the step."""

import math
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from hotloop.core.errors import InputError
from hotloop.data.dataset import Dataset, Field, sample_fields
from hotloop.data.pool import OnDeath, Ticket, WhileWaiting, WorkerPool
from hotloop.data.random import Order
from hotloop.data.ring import Ring
from hotloop.data.stages import NOTHING, Stages
from hotloop.data.worker import Feed

_AHEAD = 3
"""Batches filled ahead. Three cover a slow file; more only take memory, where one process trains alone."""
_AHEAD_OF_SEVERAL, _MEMORY = 8, 3 * 2**29
"""Several begin each step together, and each waits for the latest: more are filled ahead if they and the one that is
read fit in so many bytes, as those of 256 photographs do that the GPU resizes to 224 pixels. Four processes, one of
whose samples in ten took three times as long, did 2 % more steps with eight (bench/batches_ahead.py)."""


@dataclass(frozen=True)
class Batch:
    """One batch, valid until the next is asked for: its arrays are views of the ring.

    Attributes:
        arrays: each (size, ...).
        indices: the samples in it, replacements included.
        epoch: which pass.
        number: which batch of the epoch, from 0.
        took: what it took the workers, and how long it was waited for.
        asked: the samples that it would hold if none were damaged.
    """

    arrays: dict[str, np.ndarray]
    indices: tuple[int, ...]
    epoch: int
    number: int
    took: Stages = NOTHING
    asked: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        return len(self.indices)


@dataclass(frozen=True)
class LoaderSettings:
    """How a data set is cut into batches.

    Attributes:
        batch_size: samples a batch.
        seed: of order and augmentation.
        shuffle: a new order each epoch, from (seed, epoch); otherwise the data set's own.
        drop_last: leave out a short last batch.
        on_damaged: "replace" by another sample, "drop" it (validation: nothing counts twice), or "raise".
        part, parts: which of so many equal parts of each batch this process takes, so that several share it.

    Raises:
        InputError: `batch_size` is less than 1.
    """

    batch_size: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    on_damaged: str = "replace"
    part: int = 0
    parts: int = 1

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            what = f"batch_size is {self.batch_size}; at least 1 is needed"
            raise InputError(what, "a batch without samples trains nothing", "batch_size=64")

    def batches(self, samples: int) -> int:
        """How many batches `samples` make."""
        whole, rest = divmod(samples, self.batch_size)
        return whole if self.drop_last or not rest else whole + 1

    def size(self, number: int, samples: int) -> int:
        """Samples of batch `number` of so many, all parts together."""
        return min(self.batch_size, samples - number * self.batch_size)

    @property
    def part_size(self) -> int:
        """The most samples of a batch that this part can have."""
        return -(-self.batch_size // self.parts)

    def counted(self, number: int, samples: int) -> int:
        """Samples of this part of batch `number`; parts differ by one at most."""
        size = self.size(number, samples)
        return size * (self.part + 1) // self.parts - size * self.part // self.parts

    def places(self, number: int, samples: int) -> range:
        """Where in the order of an epoch this part of batch `number` lies.

        A batch may have fewer samples than parts. A part without any takes the batch's first sample, which does not
        count (`counted`): all processes have to compute, as they do it together.
        """
        first, size = number * self.batch_size, self.size(number, samples)
        start = first + size * self.part // self.parts
        end = start + self.counted(number, samples)
        return range(start, end) if end > start else range(first, first + 1)


class Loader:
    """Batches of one data set; several loaders can share worker processes, each as a feed of its own.

    Attributes:
        damages: each damaged sample met, by name; its reason.
        encoded: how many samples of a batch, from the first, are left to a decoder of the device; of batches that are
            begun from now on.
    """

    def __init__(self, dataset: Dataset, settings: LoaderSettings, pool: WorkerPool, feed: int, ring: Ring) -> None:
        self.encoded = 0
        self.dataset = dataset
        self.settings = settings
        self.damages: dict[str, str] = {}
        self._pool = pool
        self._feed = feed
        self._ring = ring
        self._free = deque(range(ring.slots))
        self._filling: deque[tuple[int, int, Ticket]] = deque()
        self._iterating = False
        self._order: tuple[int, Order] | None = None

    def __len__(self) -> int:
        """Batches an epoch."""
        return self.settings.batches(len(self.dataset))

    @property
    def workers(self) -> int:
        """Processes that fill its batches; 1 if this one does."""
        return max(1, self._pool.workers)

    @property
    def under_way(self) -> int:
        """Batches that are filled ahead, and the one that is read."""
        return self._ring.slots

    @property
    def memory(self) -> np.ndarray:
        """What its batches are views of, as bytes: page-lock it for faster copies to a GPU."""
        return self._ring.memory

    def size(self, number: int) -> int:
        """Samples of batch `number` of an epoch, all parts of it together, damage not counted."""
        return self.settings.size(number, len(self.dataset))

    def batches(self, epoch: int = 0, start: int = 0, epochs: int = 1) -> Generator[Batch]:
        """Batches from `start` of `epoch` on, through `epochs` passes, filled ahead over the end of each pass.

        Raises:
            DamagedSample: a sample cannot be read and `on_damaged` is "raise", or nothing could take its place.
            WorkerError: the data set raised an error of its own, or the same samples killed a worker three times.
            RuntimeError: an earlier iteration is still under way, close it first; or the loaders have been closed.
        """
        passes = range(epoch, epoch + epochs)
        positions = ((each, n) for each in passes for n in range(start if each == epoch else 0, len(self)))
        return self._filled((each, n, self._ordered(each, n)) for each, n in positions)

    def batches_of(self, indices: Iterable[Sequence[int]], first: int = 0) -> Generator[Batch]:
        """Batches of these samples, in an order that is somebody else's. Random numbers are drawn as if each batch were
        an epoch of its own, numbered from `first`: a sample may come again.

        Raises:
            as `batches`.
        """
        return self._filled((number, 0, each) for number, each in enumerate(indices, first))

    def _filled(self, upcoming: Iterator[tuple[int, int, Sequence[int]]]) -> Generator[Batch]:
        if self._iterating:
            raise RuntimeError("these batches are being iterated over already: finish or close that iteration first")
        self._iterating = True
        try:
            while self._filling:  # left by an earlier iteration: whoever ends one, by Ctrl-C say, waits for no sample
                self._pool.wait(self._filling[0][2])
                self._free.append(self._filling.popleft()[2].slot)
            while True:
                while self._free and (batch := next(upcoming, None)):
                    self._filling.append((*batch[:2], self._submit(batch[0], batch[2])))
                if not self._filling:
                    return
                started = time.perf_counter()
                self._pool.wait(self._filling[0][2])
                yield self._take(*self._filling[0], time.perf_counter() - started)
                self._free.append(self._filling.popleft()[2].slot)
        finally:
            self._iterating = False

    def _ordered(self, epoch: int, number: int) -> Sequence[int]:
        """The samples of batch `number` of an epoch."""
        samples = len(self.dataset)
        places = self.settings.places(number, samples)
        if not self.settings.shuffle:
            return places
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, Order(self.settings.seed, epoch, samples))
        indices: list[int] = self._order[1].at(places).tolist()
        return indices

    def _submit(self, epoch: int, indices: Sequence[int]) -> Ticket:
        encoded = min(self.encoded, len(indices))
        return self._pool.submit(self._feed, self._free.popleft(), epoch, indices, encoded)

    def _take(self, epoch: int, number: int, ticket: Ticket, waited: float) -> Batch:
        if ticket.error:
            raise ticket.error
        arrays = {name: view[: len(ticket.indices)] for name, view in self._ring.slot(ticket.slot).items()}
        indices = ticket.indices
        if ticket.damages:
            self.damages.update((damage.name, damage.reason) for _, damage in ticket.damages)
            if self.settings.on_damaged == "drop":
                keep = np.setdiff1d(np.arange(len(indices)), [place for place, _ in ticket.damages])
                arrays = {name: view[keep] for name, view in arrays.items()}
                indices = [indices[place] for place in keep]
        took = ticket.took.plus(Stages(late=waited))
        return Batch(arrays, tuple(indices), epoch, number, took, ticket.asked)


class Loaders:
    """Loaders that share worker processes; a context manager that ends them.

    Args:
        datasets: what they are of, and how they are cut into batches.
        workers: processes; 0: samples are read when a batch is asked for.
        while_waiting: called every second while a batch is awaited, with the seconds so far and the names of samples
            that workers are at; may raise, and the batch can be asked for again.
        on_death: called with the exit code of each worker that has died and is replaced.
        imports_main: whether workers import the script that runs; see `WorkerPool`.
    """

    def __init__(
        self, datasets: Sequence[tuple[Dataset, LoaderSettings]], workers: int,
        while_waiting: WhileWaiting | None = None, *, on_death: OnDeath = lambda exit_code: None,
        imports_main: bool = True,
    ) -> None:  # fmt: skip
        with ExitStack() as stack:
            feeds = []
            for dataset, settings in datasets:
                fields = sample_fields(dataset, settings.seed)
                ring = Ring(fields, settings.part_size, 1 + (_ahead(fields, settings) if workers else 0))
                stack.callback(ring.close)
                feeds.append(Feed(dataset, ring, settings.seed, settings.on_damaged))
            pool = WorkerPool(feeds, workers, while_waiting, on_death=on_death, imports_main=imports_main)
            stack.callback(pool.close)
            self._open = stack.pop_all()
        self._loaders = [
            Loader(dataset, settings, pool, number, feed.ring)
            for number, ((dataset, settings), feed) in enumerate(zip(datasets, feeds, strict=True))
        ]

    def __enter__(self) -> list[Loader]:
        return self._loaders

    def __exit__(self, *_: object) -> None:
        self._open.close()


def _ahead(fields: Mapping[str, Field], settings: LoaderSettings) -> int:
    size = sum(field.dtype.itemsize * math.prod(field.shape) for field in fields.values())
    return batches_ahead(settings.part_size * size, settings.parts if settings.shuffle else 1)


def batches_ahead(part_bytes: float, parts: int) -> int:
    """Batches that a training's workers fill ahead.

    Args:
        part_bytes: of this process's part of a batch.
        parts: of so many processes; in validation no step waits for others, as with one.
    """
    if parts == 1:
        return _AHEAD
    return max(_AHEAD, min(_AHEAD_OF_SEVERAL, int(_MEMORY // max(1.0, part_bytes)) - 1))


def workers_for(cpus: int, accelerated: bool) -> int:
    """How many workers suit a machine.

    Beside a GPU all processors but two, which the training process and its threads take, of up to eight but one;
    otherwise the step needs them itself.
    """
    return max(1, min(16, cpus - (2 if cpus > 8 else 1))) if accelerated else 1
