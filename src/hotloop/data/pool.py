"""Worker processes, and the chunks of batches they are filling."""

import multiprocessing
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from threading import Lock
from types import ModuleType

from hotloop.core.errors import DamagedSample, HotloopError, InputError, WorkerError
from hotloop.data.dataset import Damage
from hotloop.data.stages import NOTHING, Stages
from hotloop.data.worker import Chunk, Feed, Filling, Ready, fill, work

WhileWaiting = Callable[[float, list[str]], None]
OnDeath = Callable[[int], None]

_DEATHS = 3
"""How often a chunk may take its worker with it before the run stops."""
_READ_AT_ONCE = 8
"""Samples that are read in the time that one more is decoded in as well: 0.1 ms and 1 ms for a photograph."""
_PATIENCE_SECONDS = 1.0
"""After which a wait is interrupted, for `while_waiting`."""
_END_SECONDS, _KILLED_SECONDS = 5.0, 2.0
"""How long all workers together may take to end by themselves."""


@dataclass
class Ticket:
    """A batch being filled.

    Attributes:
        slot: where in the ring.
        indices: the samples in their places, replacements included.
        asked: the same without replacements.
        waiting: chunks still to come.
        damages: damaged samples met, each with its place.
        took: what it took the workers.
        error: why the batch cannot be had; it belongs to this batch, however many are being filled ahead.
    """

    slot: int
    indices: list[int]
    asked: tuple[int, ...] = ()
    waiting: int = 0
    damages: list[tuple[int, Damage]] = field(default_factory=list)
    took: Stages = NOTHING
    error: HotloopError | None = None


@dataclass(eq=False)
class _Worker:
    process: BaseProcess
    connection: Connection
    ready: Ready | None = None
    chunks: dict[int, Chunk] = field(default_factory=dict)


class WorkerPool:
    """Fills batches in `workers` processes, or in this one when it is waited for (`workers=0`).

    Each worker has a pipe of its own, so that one that is killed holds no lock; its chunks go to a fresh worker, which
    writes the same bytes into the same places. Workers end when this process does, however it ends. Threads take turns:
    one that waits reads the answers to all.

    Args:
        feeds: data sets and rings; chunks name them by number.
        workers: processes; each takes about 0.5 s to start, in parallel, and 60 MB.
        while_waiting: called every second while a batch is awaited, with the seconds so far and, for each worker, the
            name of the sample that it is at; may raise.
        on_death: called with the exit code of each worker that has died and is replaced.
        imports_main: whether a worker imports the script that runs, as a data set of that script's own needs. A script
            that trains as soon as it is imported would train in each worker.

    Raises:
        InputError: a data set cannot be pickled.
        WorkerError: a process could not be started.
    """

    def __init__(
        self, feeds: Sequence[Feed], workers: int, while_waiting: WhileWaiting | None = None, *,
        on_death: OnDeath = lambda exit_code: None, imports_main: bool = True,
    ) -> None:  # fmt: skip
        self._on_death = on_death
        self._imports_main = imports_main
        self._feeds = tuple(feeds)
        self._while_waiting = while_waiting
        self._context = multiprocessing.get_context("spawn")
        self._tickets: dict[int, Ticket] = {}
        self._deaths: dict[int, int] = {}
        self._unready_deaths = 0
        self._inline: deque[Chunk] = deque()
        self._numbers = 0
        self._lock = Lock()
        self._lost: WorkerError | None = None
        self._closed = False
        # Not among the process's arguments: `Process.start` hangs if a child dies before it has read 64 KiB of them.
        self._data = _pickled(feeds) if workers else b""
        self._workers: list[_Worker] = []
        try:
            for _ in range(workers):
                self._workers.append(self._start())
            for worker in self._workers:
                self._send_data(worker)
        except BaseException:
            self.close()
            raise

    @property
    def workers(self) -> int:
        """Processes that it has."""
        return len(self._workers)

    def submit(self, feed: int, slot: int, epoch: int, indices: Sequence[int], encoded: int = 0) -> Ticket:
        """Have a batch filled; `wait` for its ticket before the slot is read.

        Args:
            encoded: how many samples, from the first, are left to a decoder of the device.

        Raises:
            RuntimeError: the workers have been ended.
        """
        ticket = Ticket(slot, list(indices), tuple(indices))
        with self._lock:
            self._check_open()
            for start, end in self._parts(len(indices), encoded):
                part = tuple(indices[start:end])
                chunk = Chunk(self._numbers, feed, slot, start, epoch, part, encoded=start < encoded)
                self._numbers += 1
                self._tickets[chunk.number] = ticket
                ticket.waiting += 1
                if self._workers:
                    self._send(min(self._workers, key=lambda worker: len(worker.chunks)), chunk)
                elif self._lost:
                    self._finish(chunk, self._lost)
                else:
                    self._inline.append(chunk)
        return ticket

    def _parts(self, size: int, encoded: int) -> Iterator[tuple[int, int]]:
        """Of about the same work, as many as there are workers; reading alone is little of it."""
        whole = max(1, -(-(size - encoded) // max(1, len(self._workers))))
        for first, end, each in ((0, encoded, _READ_AT_ONCE * whole), (encoded, size, whole)):
            for start in range(first, end, each):
                yield start, min(start + each, end)

    def wait(self, ticket: Ticket) -> None:
        """Return when nothing of the ticket's batch is being filled any more; see `Ticket.error`.

        Raises:
            RuntimeError: the workers have been ended.
            Exception: what `while_waiting` raises; the batch is still being filled then.
        """
        with self._lock:
            self._check_open()
            started = time.monotonic()
            while ticket.waiting:
                if self._workers:
                    self._read_answers()
                    if self._while_waiting and (seconds := time.monotonic() - started) >= _PATIENCE_SECONDS:
                        self._while_waiting(seconds, self._being_read())
                else:
                    filling = fill(self._feeds[self._inline[0].feed], self._inline[0])
                    self._receive(self._inline.popleft(), filling)

    def close(self) -> None:
        """End the workers: those that are not done after 5 s, all together, are killed.

        One that a mount holds in the kernel ends when that lets it go: it is not waited for any longer.
        """
        self._closed = True
        for worker in self._workers:
            worker.connection.close()
        deadline = time.monotonic() + _END_SECONDS
        try:
            for worker in self._workers:
                worker.process.join(max(0, deadline - time.monotonic()))
        finally:
            for worker in self._workers:
                worker.process.kill()
            deadline = time.monotonic() + _KILLED_SECONDS
            for worker in self._workers:
                worker.process.join(max(0, deadline - time.monotonic()))
                if worker.process.is_alive():
                    multiprocessing.process._children.discard(worker.process)  # type: ignore[attr-defined]  # nor at exit
                else:
                    worker.process.close()
            self._workers.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the data workers have ended: batches are there inside `with Loaders(...)` alone")

    def _start(self) -> _Worker:
        try:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(
                target=work, args=(theirs, tuple(feed.ring for feed in self._feeds)), daemon=True, name="hotloop-data"
            )
            with nullcontext() if self._imports_main else _main_hidden():
                process.start()
        except OSError as error:
            fix = "free memory, end other processes or raise the limits (ulimit -n -u), or --set data.workers=0"
            raise WorkerError("a data worker could not be started", error.strerror or str(error), fix) from error
        theirs.close()
        return _Worker(process, ours)

    def _send_data(self, worker: _Worker) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):
            worker.connection.send_bytes(self._data)

    def _send(self, worker: _Worker, chunk: Chunk) -> None:
        worker.chunks[chunk.number] = chunk
        # If it has died, `wait` sees that and gives its chunks to a fresh one.
        with suppress(BrokenPipeError, ConnectionResetError):
            worker.connection.send(chunk)

    def _read_answers(self) -> None:
        ends = [end for worker in self._workers for end in (worker.connection, worker.process.sentinel)]
        ready = wait(ends, _PATIENCE_SECONDS if self._while_waiting else None)
        for worker in list(self._workers):
            if worker.connection in ready or worker.process.sentinel in ready:
                self._read(worker)

    def _being_read(self) -> list[str]:
        """For each worker, the sample that it is at; the first of those that it has not begun."""
        chunks = [next(iter(worker.chunks.values())) for worker in self._workers if worker.chunks]
        names = []
        for chunk in chunks:
            feed = self._feeds[chunk.feed]
            done = feed.ring.done(chunk.slot)[chunk.start : chunk.start + len(chunk.indices)]
            names.append(feed.dataset.name(chunk.indices[int(done.argmin())]))
        return names

    def _read(self, worker: _Worker) -> None:
        try:
            while worker.connection.poll():
                self._answered(worker, worker.connection.recv_bytes())
        except (EOFError, OSError):  # OSError: it was killed while it wrote its answer
            self._replace(worker)

    def _answered(self, worker: _Worker, content: bytes) -> None:
        try:
            answer: Ready | Filling = ForkingPickler.loads(content)
        except Exception as error:  # a damaged sample's name and reason may be objects of the data set's own
            number = next(iter(worker.chunks))
            answer = Filling(number, {}, (), f"its answer cannot be unpickled: {type(error).__name__}: {error}")
        if isinstance(answer, Ready):
            worker.ready, self._unready_deaths = answer, 0
        else:
            self._receive(worker.chunks.pop(answer.number), answer)

    def _receive(self, chunk: Chunk, filling: Filling) -> None:
        ticket = self._tickets[chunk.number]
        for place, index in filling.replaced.items():
            ticket.indices[place] = index
        ticket.damages += filling.damages
        ticket.took = ticket.took.plus(filling.took)
        error: HotloopError | None = None
        if filling.fatal:
            error = DamagedSample(filling.fatal.name, filling.fatal.reason)
            if self._feeds[chunk.feed].on_damaged != "raise":  # nor could another one be read in its place
                error.fix = "see that the data is still there: hotloop data check FOLDER"
        elif filling.stop:
            error = HotloopError(*filling.stop)
        elif filling.failure:
            fix = "mend the data set; with HOTLOOP_DEBUG=1 the traceback is shown"
            error = WorkerError("the data set failed to give a sample", filling.failure, fix)
            error.add_note(filling.traceback)
        self._finish(chunk, error)

    def _finish(self, chunk: Chunk, error: HotloopError | None) -> None:
        ticket = self._tickets.pop(chunk.number)
        self._deaths.pop(chunk.number, None)
        ticket.error = ticket.error or error
        ticket.waiting -= 1

    def _replace(self, dead: _Worker) -> None:
        dead.process.join()
        dead.connection.close()
        self._workers.remove(dead)
        try:
            self._check_started(dead)
            fresh = self._start()
        except WorkerError as error:
            self._lost = error
            for chunk in dead.chunks.values():
                self._finish(chunk, error)
            return
        self._send_data(fresh)
        self._workers.append(fresh)
        self._on_death(dead.process.exitcode or 0)
        # A worker takes its chunks in order: only the first can have killed it.
        for position, chunk in enumerate(dead.chunks.values()):
            deaths = self._deaths[chunk.number] = self._deaths.get(chunk.number, 0) + (
                dead.ready is not None and not position
            )
            if deaths < _DEATHS:
                self._send(fresh, chunk)
            else:
                self._finish(chunk, self._deadly(chunk, dead.process.exitcode))

    def _check_started(self, dead: _Worker) -> None:
        """Refuse to replace a worker where a fresh one would end in the same way, before its first chunk."""
        exit_code = dead.process.exitcode or 0
        self._unready_deaths += dead.ready is None
        if dead.ready is None and exit_code < 0 and self._unready_deaths >= _DEATHS:
            raise WorkerError(
                f"data workers died {_DEATHS} times before they had taken their data",
                f"the exit code of the last was {exit_code} (-9: killed, most often for memory)",
                "--set data.decode=cpu, if it is the decoder's library that fails; or --set data.workers=1",
            )
        if dead.ready is None and exit_code >= 0:  # below 0 it was killed
            raise WorkerError(
                f"a data worker ended with exit code {exit_code} before it had taken its data",
                "most likely the script trains as soon as it is imported, and each worker imports it",
                'put all that trains under `if __name__ == "__main__":`; what the worker said itself stands above',
            )
        if dead.ready and dead.ready.failure:
            raise WorkerError(
                "a data worker cannot unpickle the data set",
                dead.ready.failure,
                "open files in sample(), not before; or --set data.workers=0",
            )

    def _deadly(self, chunk: Chunk, exit_code: int | None) -> WorkerError:
        dataset = self._feeds[chunk.feed].dataset
        names = ", ".join(dataset.name(index) for index in chunk.indices[:3])
        return WorkerError(
            f"a data worker died {_DEATHS} times on the same {len(chunk.indices)} samples ({names}, ...)",
            f"its exit code was {exit_code} (-9: killed, most often for memory)",
            "--set data.workers=1, or data.decode=cpu, or look at those files",
        )


@contextmanager
def _main_hidden() -> Iterator[None]:
    """A process that is spawned meanwhile finds no script to import."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _pickled(feeds: Sequence[Feed]) -> bytes:
    try:
        return bytes(ForkingPickler.dumps([(feed.dataset, feed.seed, feed.on_damaged) for feed in feeds]))
    except Exception as error:  # pickling runs the data set's own code
        raise InputError(
            "the data set cannot travel to worker processes",
            f"{type(error).__name__}: {error}",
            "open files in sample(), not before; or --set data.workers=0",
        ) from error
