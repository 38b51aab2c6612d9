"""Batches prepared while ranks average gradients: the GPU has little else to do then."""

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import replace

import torch

from hotloop.data.dataset import Dataset
from hotloop.data.loader import LoaderSettings
from hotloop.data.stages import Stages
from hotloop.tasks.task import Tensors
from hotloop.train.execute import WARM_UP, Executor
from hotloop.train.source import DeviceBatch, Source

Prepare = Callable[[Tensors], Tensors]
"""A batch as it arrives -> what the model takes; device work only, that draws nothing on the host."""


class PreparedSource:
    """Batches of another source, prepared on a stream of their own as soon as the batch before is computed.

    What comes after that in a step, the messages between ranks and the update, leaves most of the GPU idle.

    A batch's tensors lie in memory that is used again: they are valid until the next batch is asked for.

    Args:
        source: of batches on a GPU.
        computed: recorded on that GPU when the work is queued that has read the latest batch.
        compiled: whether `prepare` is compiled, and batches of a rare shape are not to be.
        notify: told why it is not captured, if it is not.
    """

    def __init__(
        self,
        source: Source,
        prepare: Prepare,
        device: torch.device,
        computed: torch.cuda.Event,
        compiled: bool,
        notify: Callable[[str], None],
    ) -> None:
        self.settings: LoaderSettings = source.settings
        self.damages = source.damages
        self._source = source
        self._prepare = prepare
        self._device = device
        self._computed = computed
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # A pool of its own: what it computes with is in use beside the step. Rare shapes are told by the step.
        self._executor = Executor(device, True, compiled, WARM_UP, lambda text: None)
        self._notify, self._told = notify, False

    @property
    def dataset(self) -> Dataset:
        return self._source.dataset

    @property
    def stages(self) -> Stages:
        return self._source.stages

    def __len__(self) -> int:
        return len(self._source)

    def size(self, number: int) -> int:
        return self._source.size(number)

    def expand(self, tensors: Tensors) -> Tensors:
        return tensors

    def batches(self, epoch: int = 0, start: int = 0, epochs: int = 1) -> Generator[DeviceBatch]:
        with closing(self._source.batches(epoch, start, epochs)) as batches:
            while batch := self._next(batches):
                torch.cuda.current_stream(self._device).wait_stream(self._stream)
                yield batch

    def _next(self, batches: Generator[DeviceBatch]) -> DeviceBatch | None:
        # Before the source goes on, which may fill the memory of the last batch again: parts of it may have stayed as
        # they came.
        self._stream.wait_event(self._computed)
        with torch.cuda.stream(self._stream):
            batch = next(batches, None)
            if batch is None:
                return None
            ready = self._executor.run("prepare", batch.tensors, self._prepare)
        if self._executor.reason and not self._told:
            self._told = True
            self._notify(f"the preparation of batches is not captured into a CUDA graph: {self._executor.reason}")
        return replace(batch, tensors=ready)
