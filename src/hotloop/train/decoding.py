"""Images that a decoder of the device finishes, in their places there, while the step before trains."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from hotloop.data.dataset import Dataset, Sample, attempts_for, read_sample
from hotloop.data.decode import ENCODED
from hotloop.data.images import BOXES, PIXELS
from hotloop.data.loader import Batch, LoaderSettings
from hotloop.train.device_slots import DeviceSlot
from hotloop.train.gate import LOADING

T = TypeVar("T")


class DeviceDecoder(Protocol):
    """Decodes JPEGs on a device. All calls come from the thread that made it."""

    def decode(self, encoded: Sequence[np.ndarray], rooms: Sequence[Tensor]) -> list[bool]:
        """Decode files, each uint8 (bytes,), to uint8 (height, width, 3), red green blue; waits until they are there.

        Nothing that is queued may read or write the rooms any more.

        Returns:
            for each whether it could be decoded.
        """

    def close(self) -> None:
        """Give back what it holds."""


@dataclass(frozen=True)
class Decoded:
    """What came of a batch.

    Attributes:
        indices: the samples in it, int64; another where one was damaged.
        damages: those that were, by name; their reason.
        seconds: that the decoder was at work.
    """

    indices: np.ndarray
    damages: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


class Decoding:
    """Decodes what workers left encoded in a batch, in a thread.

    Args:
        open_decoder: called in that thread.
        dataset, settings: of the batches: a sample that the decoder refuses is read as a worker would have read it.
        stream: for what is copied then; None on a CPU.
    """

    def __init__(
        self, open_decoder: Callable[[], DeviceDecoder], dataset: Dataset, settings: LoaderSettings,
        stream: torch.cuda.Stream | None,
    ) -> None:  # fmt: skip
        self._dataset = dataset
        self._settings = settings
        self._stream = stream
        # The current GPU is each thread's own.
        choose = (torch.cuda.set_device, (stream.device,)) if stream else (None, ())
        self._thread = ThreadPoolExecutor(1, "hotloop-decode", *choose)
        try:
            self._decoder = self._thread.submit(open_decoder).result()
        except BaseException:
            self._thread.shutdown()
            raise

    def start(self, batch: Batch, sent: Mapping[str, Tensor], slot: DeviceSlot) -> "Future[Decoded]":
        """Finish a batch; what it is in must stay as it is until then.

        Args:
            sent: where it is on the device, all but the pixels of what is still encoded.

        Raises:
            DamagedSample: from the result: a sample is damaged, and nothing could or was to take its place.
        """
        return self._thread.submit(self._finish, batch, sent, slot)

    def close(self) -> None:
        """End the thread, once it has done what it was given, and the decoder."""
        try:
            self._thread.submit(self._decoder.close).result()
        finally:
            self._thread.shutdown()

    def run(self, work: Callable[[DeviceDecoder], T]) -> T:
        """Do something else with the decoder, where it lives."""
        return self._thread.submit(work, self._decoder).result()

    def _finish(self, batch: Batch, sent: Mapping[str, Tensor], slot: DeviceSlot) -> Decoded:
        arrays, places = batch.arrays, encoded_places(batch.arrays)
        slot.wait_unused()
        started = time.perf_counter()
        rooms = [pixel_room(sent[PIXELS][place], arrays[BOXES][place]) for place in places]
        with LOADING.passed(), torch.cuda.stream(self._stream):
            done = self._decoder.decode([file_of(arrays, place) for place in places], rooms)
        decoded = Decoded(np.asarray(batch.indices), seconds=time.perf_counter() - started)
        refused = [place for place, is_there in zip(places, done, strict=True) if not is_there]
        if not refused:
            return decoded
        slot.wait_sent()
        with LOADING.passed():
            return self._read_here(refused, batch, sent, decoded)

    def _read_here(self, places: Sequence[int], batch: Batch, sent: Mapping[str, Tensor], decoded: Decoded) -> Decoded:
        """Read samples as a worker would: what is damaged is replaced by the same one."""
        indices, damages = decoded.indices.copy(), {}
        attempts = attempts_for(self._settings.on_damaged)
        with torch.cuda.stream(self._stream):
            for place in places:
                filled = read_sample(self._dataset, self._settings.seed, batch.epoch, batch.asked[place], attempts)
                _put(filled.sample, sent, place)
                indices[place] = filled.index
                damages.update({damage.name: damage.reason for damage in filled.damages})
        if self._stream:
            self._stream.synchronize()
        return Decoded(indices, damages, decoded.seconds)


def encoded_places(arrays: Mapping[str, np.ndarray]) -> list[int]:
    """The samples of a batch that are still encoded."""
    return [int(place) for place in np.flatnonzero(arrays[BOXES][:, ENCODED])] if BOXES in arrays else []


def file_of(arrays: Mapping[str, np.ndarray], place: int) -> np.ndarray:
    """The content of a file that is still encoded, uint8 (bytes,)."""
    return arrays[PIXELS][place, : int(arrays[BOXES][place, ENCODED])]


def pixel_room(row: Tensor, box: np.ndarray) -> Tensor:
    """Where the pixels of an image go, uint8 (height, width, 3)."""
    height, width = int(box[0]), int(box[1])
    return row[: 3 * height * width].view(height, width, 3)


def other_rows(places: Sequence[int], size: int) -> list[slice]:
    """All of `size` rows but these, as few slices as possible."""
    edges = [-1, *places, size]
    return [slice(a + 1, b) for a, b in pairwise(edges) if b - a > 1]


def _put(sample: Sample, sent: Mapping[str, Tensor], place: int) -> None:
    for name, value in sample.items():
        given, row = torch.from_numpy(np.array(value)), sent[name][place]
        room = row[: given.numel()].view(given.shape) if name == PIXELS else row
        room.copy_(given)
