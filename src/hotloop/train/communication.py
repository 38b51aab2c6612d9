"""How long a rank's steps stand still because messages of the other ranks have not come."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

_SECONDS = 0.1
"""Between two windows that are timed: on a CPU such a one costs 12 µs, any other less than 1 µs."""
_NOTHING = nullcontext()


class Communication:
    """Times waits within windows: on a GPU by events on its stream, which nobody waits for; on a CPU by the clock.

    Of short windows one is timed now and then, and counts for those before it too; of long ones each is. What is sent
    while something else is computed costs no time and is not counted.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._gpu = device.type == "cuda"
        self._clock = clock
        self._due = clock()
        self._timed = False
        self._windows = 0
        self._waits: list[tuple[Any, Any]] = []
        self._under_way: list[tuple[list[tuple[Any, Any]], int]] = []
        self._seconds: float | None = None

    @property
    def seconds(self) -> float | None:
        """Of all windows so far; None where that is not known."""
        self._collect()
        return self._seconds

    def begin(self) -> None:
        """A window begins, or begins again."""
        now = self._clock()
        self._timed = now >= self._due
        if self._timed:
            self._due = now + _SECONDS
            self._waits = []

    def end(self) -> None:
        """It is launched."""
        self._windows += 1
        if self._timed:
            self._under_way.append((self._waits, self._windows))
            self._timed, self._windows = False, 0
            self._collect()

    def waiting(self) -> AbstractContextManager[None]:
        """What is done inside is to wait."""
        return self._waiting() if self._timed else _NOTHING

    def buffers_of(self, ddp: DistributedDataParallel | None) -> AbstractContextManager[None]:
        """The forward pass inside waits for the first rank's buffers."""
        return self._buffers_of(ddp) if self._timed and ddp else _NOTHING

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        begun = self._mark()
        yield
        self._waits.append((begun, self._mark()))

    @contextmanager
    def _buffers_of(self, ddp: DistributedDataParallel) -> Iterator[None]:
        sync = ddp._sync_buffers

        def timed() -> None:
            with self.waiting():
                sync()  # type: ignore[no-untyped-call]

        ddp._sync_buffers = timed  # type: ignore[method-assign]
        try:
            yield
        finally:
            del ddp._sync_buffers

    def backward(self, loss: Tensor, gradient: Tensor) -> None:
        """Go backward. What comes after the last gradient is to wait for their means.

        DDP waits in a callback that autograd calls at the end of all; one that is queued first is called before.
        """
        last: Any = loss
        if not self._timed or not loss.requires_grad:
            last.backward(gradient)
            return
        computed: list[Any] = []
        queue = Variable._execution_engine.queue_callback
        last.register_hook(lambda _: queue(lambda: computed.append(self._mark())))
        last.backward(gradient)
        if computed:
            self._waits.append((computed[0], self._mark()))

    def _mark(self) -> Any:
        if not self._gpu:
            return self._clock()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _collect(self) -> None:
        while self._under_way:
            waits, windows = self._under_way[0]
            if self._gpu and not all(mark.query() for pair in waits for mark in pair):
                return
            del self._under_way[0]
            seconds = sum(begun.elapsed_time(end) / 1000 if self._gpu else end - begun for begun, end in waits)
            self._seconds = (self._seconds or 0.0) + windows * seconds
