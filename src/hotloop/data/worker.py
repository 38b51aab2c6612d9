"""The work of one worker process: read samples, write them into their places in the ring."""

import ctypes
import os
import signal
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue
from threading import Thread

import numpy as np

from hotloop.core.errors import DamagedSample, HotloopError
from hotloop.data.dataset import Damage, Dataset, attempts_for, read_sample
from hotloop.data.ring import Ring
from hotloop.data.stages import NOTHING, READING, Stages


@dataclass(frozen=True)
class Feed:
    """A data set and the ring that its batches go to.

    Attributes:
        on_damaged: "replace" draws another sample, "drop" leaves the place as it is, "raise" fails the chunk.
    """

    dataset: Dataset
    ring: Ring
    seed: int
    on_damaged: str


@dataclass(frozen=True)
class Chunk:
    """A part of one batch: fill places `start` to `start + len(indices)` of `slot`.

    Attributes:
        encoded: whether a decoder of the device finishes what it can.
    """

    number: int
    feed: int
    slot: int
    start: int
    epoch: int
    indices: tuple[int, ...]
    encoded: bool = False


@dataclass(frozen=True)
class Ready:
    """The first message of a worker: it has taken its data, or why it cannot."""

    failure: str = ""


@dataclass(frozen=True)
class Filling:
    """What became of a chunk.

    Attributes:
        replaced: places whose sample is another than was asked for, and which.
        damages: damaged samples met, each with the place it should have had.
        failure: an error of the data set's own, in a line; empty if there was none.
        traceback: where it was raised.
        stop: what, cause and fix of an error that says itself what is wrong.
        fatal: a sample that could be neither read nor replaced nor dropped.
        took: what it took the worker.
    """

    number: int
    replaced: dict[int, int]
    damages: tuple[tuple[int, Damage], ...]
    failure: str = ""
    traceback: str = ""
    stop: tuple[str, str, str] | None = None
    fatal: Damage | None = None
    took: Stages = NOTHING


_END_SECONDS = 10.0
"""For the chunk that is being filled; the training process gives half of that."""
NICE = 5
"""The training process and the threads that feed the device come first where processors are few."""


def fill(feed: Feed, chunk: Chunk) -> Filling:
    """Read a chunk's samples and write them into the ring. The same chunk always gives the same bytes."""
    started, read = time.perf_counter(), READING.seconds
    filling = _filled(feed, chunk)
    took = Stages(reading=READING.seconds - read, working=time.perf_counter() - started)
    return replace(filling, took=took)


def _filled(feed: Feed, chunk: Chunk) -> Filling:
    views = feed.ring.slot(chunk.slot)
    done = feed.ring.done(chunk.slot)[chunk.start : chunk.start + len(chunk.indices)]
    done[:] = False
    attempts = attempts_for(feed.on_damaged)
    replaced: dict[int, int] = {}
    damages: list[tuple[int, Damage]] = []
    try:
        for place, index in enumerate(chunk.indices, chunk.start):
            done[: place - chunk.start] = True
            try:
                filled = read_sample(feed.dataset, feed.seed, chunk.epoch, index, attempts, chunk.encoded)
            except DamagedSample as damaged:
                if feed.on_damaged != "drop":
                    raise
                damages.append((place, Damage(damaged.name, damaged.reason)))
                continue
            for name, view in views.items():
                value = np.asarray(filled.sample[name])
                try:
                    to = _part(view[place], value) if name in feed.dataset.room else view[place, ...]
                    to[...] = _checked(value, to)
                except ValueError as error:
                    raise ValueError(f"{name} of {feed.dataset.name(filled.index)} {error}") from None
            if filled.index != index:
                replaced[place] = filled.index
            damages += [(place, damage) for damage in filled.damages]
    except DamagedSample as damaged:
        return Filling(chunk.number, replaced, tuple(damages), fatal=Damage(damaged.name, damaged.reason))
    except HotloopError as error:
        return Filling(chunk.number, replaced, tuple(damages), stop=(error.what, error.cause, error.fix))
    except Exception as error:  # whatever the data set raises is told in the training process
        frame = traceback.extract_tb(error.__traceback__)[-1]
        failure = f"{type(error).__name__}: {error} ({frame.filename}, line {frame.lineno})"
        return Filling(chunk.number, replaced, tuple(damages), " ".join(failure.split()), traceback.format_exc())
    return Filling(chunk.number, replaced, tuple(damages))


def _part(room: np.ndarray, value: np.ndarray) -> np.ndarray:
    """The beginning of a sample's room, in the shape of the value: one copy, however the value lies in memory."""
    if value.size > len(room):
        raise ValueError(f"has {value.size:,} elements; there is room for {len(room):,} (Dataset.room)")
    return room[: value.size].reshape(value.shape)


def _checked(value: np.ndarray, to: np.ndarray) -> np.ndarray:
    """The value, if it fits into a batch as it is; numpy would broadcast or cast it silently."""
    if (value.shape, value.dtype) != (to.shape, to.dtype):
        raise ValueError(f"has shape {value.shape} of {value.dtype}, the first sample's is {to.shape} of {to.dtype}")
    return value


def work(connection: Connection, rings: tuple[Ring, ...]) -> None:
    """Receive what feeds are made of, then fill chunks until the training process closes the connection or is gone."""
    # Ctrl-C and a scheduler's SIGTERM reach the whole group; the training process decides when the workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.nice(NICE)
    _keep_memory()
    with suppress(EOFError, OSError):
        content = connection.recv_bytes()
        try:
            data: list[tuple[Dataset, int, str]] = ForkingPickler.loads(content)
            parts = zip(data, rings, strict=True)
            feeds = [Feed(dataset.in_worker(), ring, seed, how) for (dataset, seed, how), ring in parts]
        except Exception as error:  # unpickling runs the data set's own code
            connection.send(Ready(" ".join(f"{type(error).__name__}: {error}".split())))
            return
        connection.send(Ready())
        chunks: SimpleQueue[Chunk | None] = SimpleQueue()
        # A thread takes chunks in at once: else both sides could wait for the other to read, their pipes full.
        Thread(target=_take_in, args=(connection, chunks), daemon=True).start()
        while chunk := chunks.get():
            connection.send(fill(feeds[chunk.feed], chunk))


def _keep_memory() -> None:
    """Have freed memory kept for the next image: taken anew from the system, its pages take a tenth of the time.

    Blocks above 32 MiB are given back as before. See mallopt(3).
    """
    trim_threshold, mmap_threshold = -1, -3
    with suppress(AttributeError):  # musl has none
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(trim_threshold, 64 * 2**20)
        mallopt(mmap_threshold, 32 * 2**20)


def _take_in(connection: Connection, chunks: "SimpleQueue[Chunk | None]") -> None:
    with suppress(EOFError, OSError):
        while True:
            chunks.put(connection.recv())
    chunks.put(None)
    time.sleep(_END_SECONDS)
    os._exit(1)  # the training process is gone, and a sample that is waited for would keep this one for ever
