"""Batches of a data set in a known order, filled ahead of the step."""

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np

from hotloop.core.errors import DamagedSample
from hotloop.data.dataset import Damage, Dataset, sample_fields
from hotloop.data.pool import Ticket, WorkerPool
from hotloop.data.random import epoch_order
from hotloop.data.ring import Ring
from hotloop.data.worker import Feed

_AHEAD = 3
"""Batches filled ahead. Three cover a slow file; more only take memory."""


@dataclass(frozen=True)
class Batch:
    """One batch, valid until the next is asked for: its arrays are views of the ring.

    Attributes:
        arrays: each (size, ...).
        indices: the samples in it, replacements included.
        epoch: which pass.
        number: which batch of the epoch, from 0.
    """

    arrays: dict[str, np.ndarray]
    indices: tuple[int, ...]
    epoch: int
    number: int

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
        on_damaged: take another sample, leave it out (validation: nothing counts twice), or raise.
    """

    batch_size: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    on_damaged: str = "replace"


class Loader:
    """Batches of one data set. Loaders that share worker processes are opened together by `open_loaders`.

    Attributes:
        damages: each damaged sample met, by name; its reason.
    """

    def __init__(self, dataset: Dataset, settings: LoaderSettings, pool: WorkerPool, feed: int, ring: Ring) -> None:
        self.dataset = dataset
        self.settings = settings
        self.damages: dict[str, str] = {}
        self._pool = pool
        self._feed = feed
        self._ring = ring
        self._free = deque(range(ring.slots))
        self._order: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        """Batches an epoch."""
        whole, rest = divmod(len(self.dataset), self.settings.batch_size)
        return whole if self.settings.drop_last or not rest else whole + 1

    @property
    def memory(self) -> np.ndarray:
        """What its batches are views of, as bytes: page-lock it for faster copies to a GPU."""
        return self._ring.memory

    def size(self, number: int) -> int:
        """Samples of batch `number` of an epoch, damage not counted."""
        return min(self.settings.batch_size, len(self.dataset) - number * self.settings.batch_size)

    def batches(self, epoch: int = 0, start: int = 0, epochs: int = 1) -> Generator[Batch]:
        """Batches from `start` of `epoch` on, through `epochs` passes, filled ahead over the end of each pass.

        Raises:
            DamagedSample: a sample cannot be read and `on_damaged` is "raise", or nothing could take its place.
            WorkerError: the data set raised an error of its own, or the same samples killed a worker three times.
            RuntimeError: an earlier iteration is still under way; close it first.
        """
        if len(self._free) < self._ring.slots:
            raise RuntimeError("these batches are being iterated over already: finish or close that iteration first")
        upcoming = ((e, n) for e in range(epoch, epoch + epochs) for n in range(start if e == epoch else 0, len(self)))
        filling: deque[tuple[int, int, Ticket]] = deque()
        try:
            while True:
                while self._free and (position := next(upcoming, None)):
                    filling.append((*position, self._submit(*position)))
                if not filling:
                    return
                self._pool.wait(filling[0][2])
                yield self._take(*filling[0])
                self._free.append(filling.popleft()[2].slot)
        finally:
            for _, _, ticket in filling:
                self._pool.wait(ticket)
                self._free.append(ticket.slot)

    def _submit(self, epoch: int, number: int) -> Ticket:
        if self._order is None or self._order[0] != epoch:
            samples = len(self.dataset)
            shuffled = self.settings.shuffle
            self._order = (epoch, epoch_order(self.settings.seed, epoch, samples) if shuffled else np.arange(samples))
        start = number * self.settings.batch_size
        indices = self._order[1][start : start + self.settings.batch_size]
        return self._pool.submit(self._feed, self._free.popleft(), epoch, [int(index) for index in indices])

    def _take(self, epoch: int, number: int, ticket: Ticket) -> Batch:
        if ticket.error:
            raise ticket.error
        arrays = {name: view[: len(ticket.indices)] for name, view in self._ring.slot(ticket.slot).items()}
        indices = ticket.indices
        if ticket.damages:
            self._note([damage for _, damage in ticket.damages])
            if self.settings.on_damaged == "drop":
                keep = np.setdiff1d(np.arange(len(indices)), [place for place, _ in ticket.damages])
                arrays = {name: view[keep] for name, view in arrays.items()}
                indices = [indices[place] for place in keep]
        return Batch(arrays, tuple(indices), epoch, number)

    def _note(self, damages: Sequence[Damage]) -> None:
        if self.settings.on_damaged == "raise":
            raise DamagedSample(damages[0].name, damages[0].reason)
        self.damages.update((damage.name, damage.reason) for damage in damages)


class Loaders:
    """Loaders that share worker processes; a context manager that ends them."""

    def __init__(self, datasets: Sequence[tuple[Dataset, LoaderSettings]], workers: int) -> None:
        self._rings = [
            Ring(sample_fields(dataset, settings.seed), settings.batch_size, 1 + (_AHEAD if workers else 0))
            for dataset, settings in datasets
        ]
        feeds = [
            Feed(dataset, ring, settings.seed) for (dataset, settings), ring in zip(datasets, self._rings, strict=True)
        ]
        self._pool = WorkerPool(feeds, workers)
        self._loaders = [
            Loader(dataset, settings, self._pool, number, ring)
            for number, ((dataset, settings), ring) in enumerate(zip(datasets, self._rings, strict=True))
        ]

    def __enter__(self) -> list[Loader]:
        return self._loaders

    def __exit__(self, *_: object) -> None:
        self._pool.close()
        for ring in self._rings:
            ring.close()


def workers_for(cpus: int, accelerated: bool) -> int:
    """How many workers suit a machine: beside a GPU all processors but one; otherwise the step needs them itself."""
    return max(1, min(16, cpus - 1)) if accelerated else 1
