"""Where the loop's batches come from: from a loader's workers, or from arrays that are on the device already."""

import time
from collections.abc import Generator
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from hotloop.data.arrays import ArrayDataset
from hotloop.data.dataset import Dataset
from hotloop.data.images import PIXELS
from hotloop.data.loader import Batch, LoaderSettings
from hotloop.data.random import Order, sample_numbers
from hotloop.data.stages import Stages
from hotloop.tasks.task import RANDOM, Tensors
from hotloop.train.decoding import Decoded, Decoding, encoded_places, other_rows
from hotloop.train.device_slots import DeviceSlot
from hotloop.train.split import Split

SLOTS = 3
"""Batches on the device: one in use, one on its way, and one that lets the host be a step ahead of the device."""


@dataclass(frozen=True)
class DeviceBatch:
    """A batch whose tensors are on the device, or on their way there.

    Attributes:
        tensors: what `Source.expand` makes the samples' tensors from.
        indices: the samples in it, replacements included, int64 (size,).
        epoch: which pass.
        number: which batch of the epoch, from 0.
    """

    tensors: Tensors
    indices: np.ndarray
    epoch: int
    number: int

    @property
    def size(self) -> int:
        return len(self.indices)


class Source(Protocol):
    """Batches of one data set on one device, in the order that seed and epoch say.

    Attributes:
        damages: each damaged sample met, by name; its reason.
        stages: what the way of its batches has taken so far.
    """

    settings: LoaderSettings
    damages: dict[str, str]
    stages: Stages

    @property
    def dataset(self) -> Dataset:
        """What the batches are of."""

    def __len__(self) -> int:
        """Batches an epoch."""

    def size(self, number: int) -> int:
        """Samples of batch `number` of an epoch, all parts of it together, damage not counted."""

    def batches(self, epoch: int = 0, start: int = 0, epochs: int = 1) -> Generator[DeviceBatch]:
        """Batches from `start` of `epoch` on, through `epochs` passes."""

    def expand(self, tensors: Tensors) -> Tensors:
        """The samples' own tensors; runs on the device and may be captured into a graph."""


DEVICE_SHARE = 0.25
"""Of the free memory of a GPU that arrays may take."""


class ArraySource:
    """Batches gathered from arrays.

    The order and the random numbers of an epoch are copied to the device once; a batch is then a slice of the order.
    With arrays on the device `expand` gathers there, with larger ones the host gathers.

    Args:
        numbers: random numbers a sample, for `Task.prepare`.
    """

    def __init__(self, dataset: ArrayDataset, settings: LoaderSettings, device: torch.device, numbers: int = 0) -> None:
        self.settings = settings
        self.damages: dict[str, str] = {}
        self.stages = Stages()
        self._dataset = dataset
        self._numbers = numbers
        self._device = device
        self._home = device if _fits(dataset.size_bytes, device, DEVICE_SHARE) else torch.device("cpu")
        self._arrays = {name: torch.from_numpy(array).to(self._home) for name, array in dataset.arrays.items()}
        self._order = torch.arange(len(dataset), device=self._home)
        self._random = torch.zeros(len(dataset), numbers, device=self._home)

    @property
    def dataset(self) -> Dataset:
        return self._dataset

    def __len__(self) -> int:
        return self.settings.batches(len(self.dataset))

    def size(self, number: int) -> int:
        return self.settings.size(number, len(self.dataset))

    def batches(self, epoch: int = 0, start: int = 0, epochs: int = 1) -> Generator[DeviceBatch]:
        drawn = None
        for current in range(epoch, epoch + epochs):
            order = self._begin(*(drawn or self._draw(current)))
            drawn = None
            for number in range(start if current == epoch else 0, len(self)):
                if number == len(self) - 1 and current + 1 < epoch + epochs:
                    drawn = self._draw(current + 1)  # while the device is busy with what is queued
                places = self.settings.places(number, len(self.dataset))
                chosen = self._order[places.start : places.stop]
                tensors = {"indices": chosen} if self._home == self._device else self._sent(chosen)
                yield DeviceBatch(tensors, order[places.start : places.stop], current, number)

    def expand(self, tensors: Tensors) -> Tensors:
        return self._gather(tensors["indices"]) if self._home == self._device else tensors

    def _draw(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Order and random numbers of an epoch."""
        samples, seed = len(self.dataset), self.settings.seed
        order = Order(seed, epoch, samples).at(range(samples)) if self.settings.shuffle else np.arange(samples)
        return order, sample_numbers(seed, epoch, samples, self._numbers)

    def _begin(self, order: np.ndarray, random: np.ndarray) -> np.ndarray:
        """Put them where captured graphs read them."""
        for target, values in ((self._order, torch.from_numpy(order)), (self._random, torch.from_numpy(random))):
            target.copy_(values.pin_memory() if target.is_cuda else values, non_blocking=True)
        return order

    def _gather(self, indices: Tensor) -> Tensors:
        gathered = {name: array.index_select(0, indices) for name, array in self._arrays.items()}
        return {**gathered, RANDOM: self._random.index_select(0, indices)} if self._numbers else gathered

    def _sent(self, indices: Tensor) -> Tensors:
        pinned = {name: tensor.pin_memory() for name, tensor in self._gather(indices).items()}
        return {name: tensor.to(self._device, non_blocking=True) for name, tensor in pinned.items()}


def _fits(size_bytes: int, device: torch.device, share: float) -> bool:
    return device.type == "cpu" or size_bytes <= share * torch.cuda.mem_get_info(device)[0]


class Batches(Protocol):
    """What fills batches in the host's memory: a `Loader`, or one in another order."""

    settings: LoaderSettings
    damages: dict[str, str]
    encoded: int

    @property
    def dataset(self) -> Dataset:
        """What the batches are of."""

    @property
    def workers(self) -> int:
        """Processes that fill them."""

    @property
    def under_way(self) -> int:
        """Batches that are filled ahead, and the one that is read."""

    def __len__(self) -> int:
        """Batches an epoch."""

    def size(self, number: int) -> int:
        """Samples of batch `number` of an epoch."""

    def batches(self, epoch: int = 0, start: int = 0, epochs: int = 1) -> Generator[Batch]:
        """Batches from `start` of `epoch` on, through `epochs` passes."""


class LoaderSource:
    """Batches that a loader's workers fill, copied to the device while the step before trains.

    On a GPU a stream of its own copies, so that the training does not wait; `page_locked` keeps the host from waiting.

    Args:
        numbers: random numbers a sample, for `Task.prepare`.
        decoding: finishes what the workers leave encoded; they leave as much as it has time for.
    """

    def __init__(
        self, loader: Batches, device: torch.device, numbers: int = 0, decoding: Decoding | None = None
    ) -> None:
        self.settings = loader.settings
        self.damages = loader.damages
        self.stages = Stages()
        self._loader = loader
        self._device = device
        self._numbers = numbers
        self._decoding = decoding
        self._split = Split(loader.settings.part_size, loader.workers, loader.under_way)
        self._table: tuple[int, np.ndarray] = (-1, np.zeros((0, 0)))
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @property
    def dataset(self) -> Dataset:
        return self._loader.dataset

    def __len__(self) -> int:
        return len(self._loader)

    def size(self, number: int) -> int:
        return self._loader.size(number)

    def expand(self, tensors: Tensors) -> Tensors:
        return tensors

    def batches(self, epoch: int = 0, start: int = 0, epochs: int = 1) -> Generator[DeviceBatch]:
        with closing(self._loader.batches(epoch, start, epochs)) as batches:
            if self._stream is None:
                for batch in batches:
                    self.stages = self.stages.plus(batch.took)
                    tensors = {name: torch.from_numpy(array) for name, array in self._arrays(batch).items()}
                    yield DeviceBatch(tensors, np.asarray(batch.indices), batch.epoch, batch.number)
            else:
                yield from self._copied_ahead(batches, self._stream)

    def _copied_ahead(self, batches: Generator[Batch], stream: torch.cuda.Stream) -> Generator[DeviceBatch]:
        """One batch is on its way while the one before is trained on."""
        # Memory of an earlier iteration may still be read, and engines wait for no stream.
        torch.cuda.current_stream(self._device).synchronize()
        slots = cycle([DeviceSlot(self._device, stream) for _ in range(SLOTS)])
        ahead: _Sending | None = None
        trained: DeviceSlot | None = None
        started = time.perf_counter()
        while batch := self._next(batches):
            late = batch.took.late if _is_out_of_work(trained) else 0.0
            sending = self._send(batch, next(slots))
            try:
                if ahead:
                    trained = ahead.slot
                    yield from ahead.handed_over()
            except BaseException:  # most often the end of the iteration
                with suppress(Exception):
                    sending.wait()
                raise
            asked = time.perf_counter()
            took = batch.took.plus(sending.wait())  # the loader fills its place anew once the next batch is asked for
            now = time.perf_counter()
            behind = now - asked if _is_out_of_work(trained) else 0.0
            ahead = sending
            self.damages.update(sending.damages)
            took = replace(took, late=late, behind=behind)
            self.stages = self.stages.plus(took)
            if self._decoding:
                self._split.saw(now - started, took)
            started = now
        if ahead:
            yield from ahead.handed_over()

    def _next(self, batches: Generator[Batch]) -> Batch | None:
        if self._decoding:
            self._loader.encoded = self._split.count
        return next(batches, None)

    def _send(self, batch: Batch, slot: DeviceSlot) -> "_Sending":
        arrays, indices = self._arrays(batch), np.asarray(batch.indices)
        places = encoded_places(arrays) if self._decoding else []
        parts = {list(arrays).index(PIXELS): other_rows(places, batch.size)} if places else {}
        tensors = dict(zip(arrays, slot.send([torch.from_numpy(a) for a in arrays.values()], parts), strict=True))
        decoded = None
        if self._decoding and places:
            decoded = self._decoding.start(batch, tensors, slot)
        return _Sending(DeviceBatch(tensors, indices, batch.epoch, batch.number), slot, decoded)

    def _arrays(self, batch: Batch) -> dict[str, np.ndarray]:
        if not self._numbers:
            return batch.arrays
        if self._table[0] != batch.epoch:
            samples = len(self.dataset)
            self._table = batch.epoch, sample_numbers(self.settings.seed, batch.epoch, samples, self._numbers)
        return {**batch.arrays, RANDOM: self._table[1][np.asarray(batch.indices)]}


def _is_out_of_work(trained: DeviceSlot | None) -> bool:
    """Whether the device has done all that was queued, the last batch being there."""
    return trained is None or trained.is_unused


@dataclass(frozen=True)
class _Sending:
    """A batch on its way to the device.

    Attributes:
        decoded: what comes of the images that are decoded there, if any are.
    """

    batch: DeviceBatch
    slot: DeviceSlot
    decoded: "Future[Decoded] | None"

    def wait(self) -> Stages:
        """Until it is there; what that took.

        Raises:
            DamagedSample: an image is damaged, and nothing could or was to take its place.
        """
        try:
            decoding = self.decoded.result().seconds if self.decoded else 0.0
        finally:
            self.slot.wait_sent()
        return Stages(decoding=decoding, copying=self.slot.copy_seconds)

    @property
    def damages(self) -> dict[str, str]:
        return self.decoded.result().damages if self.decoded else {}

    def handed_over(self) -> Generator[DeviceBatch]:
        """For what is queued until the next one is asked for."""
        self.slot.hand_over()
        try:
            yield replace(self.batch, indices=self.decoded.result().indices) if self.decoded else self.batch
        finally:
            self.slot.used()
