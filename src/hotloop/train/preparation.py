"""What is done with a batch between its arrival and the step, where that is no part of the step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from hotloop.data.random import batch_seed
from hotloop.tasks.task import Task, Tensors
from hotloop.train.execute import WARM_UP, Executor
from hotloop.train.pieces import memory_errors, no_room, release
from hotloop.train.random_state import drawn_from
from hotloop.train.source import DeviceBatch

Prepare = Callable[[Tensors], Tensors]
"""A batch as it arrives -> what the model takes."""


def prepares_in_step(task: Task) -> bool:
    """Whether `prepare` may be a part of the step, and captured with it: it draws nothing on the host."""
    return task.prepare_is_pure or type(task).prepare is Task.prepare


class Preparation:
    """Nothing: the step prepares batches.

    Attributes:
        stream: on which batches arrive, if it is not the current one.
    """

    stream: torch.cuda.Stream | None = None

    @contextmanager
    def loading(self) -> Iterator[None]:
        """The next batch is asked for inside."""
        yield

    def __call__(self, batch: DeviceBatch) -> Tensors:
        """What the step takes."""
        return batch.tensors


class PreparedByDraws(Preparation):
    """Apart from the step, as `prepare` draws random numbers on the host, which must depend on the batch alone.

    Args:
        rank: ranks have other samples of a batch, and draw for those.
    """

    def __init__(self, prepare: Prepare, seed: int, rank: int) -> None:
        self._prepare, self._seed, self._rank = prepare, seed, rank

    def __call__(self, batch: DeviceBatch) -> Tensors:
        with drawn_from(batch_seed(self._seed, batch.epoch, batch.number + (self._rank << 32))):
            return self._prepare(batch.tensors)


class PreparedBeside(Preparation):
    """On a stream of its own, as soon as the batch before is computed.

    What comes after that in a step, the messages between ranks and the update, leaves most of the GPU idle. A batch
    lies in memory that is used again: it is valid until the next one is asked for.

    Args:
        prepare: device work only, that reads nothing but the batch.
        step: what the step's work is run by.
        compiled: whether `prepare` is, and batches of a rare shape are not to be.
        notify: told why it is not captured, if it is not.
    """

    def __init__(
        self, prepare: Prepare, device: torch.device, step: Executor, compiled: bool, notify: Callable[[str], None]
    ) -> None:
        self._stream = self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._prepare, self._device, self._step, self._notify = prepare, device, step, notify
        self._computed = step.computed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        # Of its own, as its memory is in use beside the step. Rare shapes are told by the step's; graphs of the step go
        # on with a random state that a capture which breaks off replaces.
        self._executor = Executor(device, True, compiled, WARM_UP, lambda text: None, step.forget)
        self._executor.captures_alone = True
        self._told = False

    @contextmanager
    def loading(self) -> Iterator[None]:
        # Before memory of the last batch is filled again: parts of it may be what came.
        self._stream.wait_event(self._computed)
        with torch.cuda.stream(self._stream):
            yield

    def __call__(self, batch: DeviceBatch) -> Tensors:
        return self.prepared(batch.tensors)

    def prepared(self, tensors: Tensors) -> Tensors:
        """What the step takes, on the current stream.

        Raises:
            HotloopError: memory ran out; a batch is not cut before it is prepared.
        """
        paused = self._step.paused and not self._step.reason
        if self._executor.paused and not paused:  # shapes and calls are counted anew with the step's
            self._executor.forget()
        self._executor.paused = paused
        # One graph, wherever a batch lies: to copy what came takes less than a prepared batch for each of those places.
        came = {name: tensor.detach() for name, tensor in tensors.items()}
        with torch.cuda.stream(self._stream):
            ready = self._run(came)
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        if self._executor.reason and not self._told:
            self._told = True
            self._step.forget()  # its graphs read what this one's have made
            self._notify(f"the preparation of batches is not captured into a CUDA graph: {self._executor.reason}")
        return dict(ready)  # the step's own to write into, where a graph has made it

    def _run(self, tensors: Tensors, again: bool = True) -> Tensors:
        try:
            with memory_errors():
                ready: Tensors = self._executor.run("prepare", tensors, self._prepare)
        except torch.OutOfMemoryError as error:
            if not again:
                raise no_room("a batch that is prepared does not", str(error)) from error
            release(error)
            return self._run(tensors, again=False)
        return ready
