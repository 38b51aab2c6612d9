"""Batches of any loader on their way to the GPU while the step before trains."""

import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten

from hotloop.core.errors import InputError
from hotloop.core.units import count
from hotloop.train.device_slots import DeviceSlot, Rooms
from hotloop.train.gate import LOADING

T = TypeVar("T")

_END_SECONDS = 5.0
"""How long the reading thread may take to end."""


class prefetch(Generic[T]):  # noqa: N801 - used as a function
    """Iterate over a loader's batches on a device, each copied there while the one before is in use.

    A thread asks `batches` and moves what they hold into page-locked memory; from there it is copied on a stream of its
    own. What `batches` raises, a worker's death for example, is raised where the next batch is asked for.

    Args:
        batches: any iterable, such as a DataLoader; iterated anew at each pass. Tensors in tuples, lists, dicts and
            what torch's pytree knows are copied; all else, tensors on a device too, passes as it is. Page-locked ones
            are copied from where they are: they must stay as they are until the next batch is asked for.
        device: where to; on a CPU nothing is done but `transform`.
        depth: batches that are read and copied ahead.
        transform: what is done with each batch on the device before it is handed over, beside the training: cast,
            normalise.

    A batch's tensors lie in memory that is used again: they are valid until the next batch is asked for. Memory taken:
    `depth` + 1 batches, page-locked and on the device.

    Raises:
        InputError: `depth` is less than 1, or torch sees no such GPU.

    Example:
        ```python
        for images, labels in hotloop.prefetch(loader, "cuda"):
            step((images, labels))
        ```
    """

    def __init__(
        self,
        batches: Iterable[T],
        device: torch.device | str = "cuda",
        depth: int = 2,
        transform: Callable[[T], T] | None = None,
    ) -> None:
        if depth < 1:
            raise InputError(f"depth = {depth}", "at least one batch has to be read ahead", "depth=2")
        self._batches = batches
        self._device = _device(device)
        if self._device.type == "cuda" and (self._device.index or 0) >= torch.cuda.device_count():
            cause = f"torch sees {count(torch.cuda.device_count(), 'GPU')} here"
            raise InputError(f'device = "{device}"', cause, 'device="cpu", where batches stay; or see: hotloop doctor')
        self._depth = depth
        self._transform = transform
        self._idle: list[_Slot] = []

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[T]:
        # Here and not in the thread: a DataLoader draws its seed in it.
        iterator = iter(self._batches)
        if self._device.type == "cuda":
            return self._copied(iterator)
        return (self._transform(batch) if self._transform else batch for batch in iterator)

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        """One for all passes: the allocator keeps memory for each."""
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def _copied(self, iterator: Iterator[T]) -> Generator[T]:
        slots = [self._idle.pop() if self._idle else self._new_slot() for _ in range(self._depth + 1)]
        reader = Reader(iterator, slots, self._stream.device)
        under_way: list[_Slot] = []
        try:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))  # memory of an earlier pass
            while True:
                while len(under_way) < self._depth and (slot := reader.next(wait=not under_way)):
                    slot.send(self._transform)
                    under_way.append(slot)
                if not under_way:
                    return
                slot = under_way.pop(0)
                try:
                    yield slot.hand_over()
                finally:
                    slot.used()
                reader.give_back(slot)
        finally:
            if reader.close():
                self._stream.synchronize()  # what was on its way leaves the host's memory
                self._idle += slots

    def _new_slot(self) -> "_Slot":
        return _Slot(self._device, self._stream)


class Package(Protocol):
    """What a reader packs an item into."""

    def pack(self, item: Any) -> None:
        """Take it, in the reader's thread."""


P = TypeVar("P", bound=Package)


class Reader(Generic[P]):
    """Asks an iterator for its items in a thread and packs each into one of some packages, which go round.

    Args:
        device: the current GPU of that thread.
    """

    def __init__(self, items: Iterator[Any], packages: Iterable[P], device: torch.device | None = None) -> None:
        self._items = items
        self._device = device
        self._gradients = torch.is_grad_enabled()
        self._closing = False
        self._error: BaseException | None = None
        self._free: queue.SimpleQueue[P | None] = queue.SimpleQueue()
        self._full: queue.SimpleQueue[P | BaseException | None] = queue.SimpleQueue()
        for package in packages:
            self._free.put(package)
        self._ended = False
        self._thread = threading.Thread(target=self._read, name="hotloop-prefetch", daemon=True)
        self._thread.start()

    def next(self, wait: bool) -> P | None:
        """The next package; None at the end, or without `wait` if none is ready or an error is all that is left.

        Raises:
            BaseException: what the iterator raised, once all before it is taken.
        """
        if self._error and wait:
            error, self._error = self._error, None
            raise error
        if self._ended:
            return None
        try:
            found = self._full.get(block=wait)
        except queue.Empty:
            return None
        if not isinstance(found, BaseException):
            self._ended = found is None
            return found
        self._ended, self._error = True, found
        return self.next(wait)

    def give_back(self, package: P) -> None:
        """It may be packed anew."""
        self._free.put(package)

    def close(self) -> bool:
        """End the thread, and a generator that it asks; one that waits for its next item ends with the process.

        Returns whether it has ended.
        """
        self._closing = True
        self._free.put(None)
        self._thread.join(_END_SECONDS)
        return not self._thread.is_alive()

    def _read(self) -> None:
        end: BaseException | None = None
        try:
            torch.set_grad_enabled(self._gradients)  # of this thread, as the current GPU is
            if self._device:
                torch.cuda.set_device(self._device)
            while (package := self._free.get()) is not None and not self._closing:
                with LOADING.passed():
                    item = next(self._items)
                package.pack(item)
                self._full.put(package)
        except StopIteration:
            pass
        except BaseException as error:  # raised where batches are asked for
            end = error
        try:
            if isinstance(self._items, Generator):
                self._items.close()
        except BaseException as error:
            end = end or error
        self._full.put(end)


def _device(named: torch.device | str) -> torch.device:
    try:
        device = torch.device(named)
    except RuntimeError:  # it knows no such kind
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        cause = "batches are copied ahead to NVIDIA GPUs alone"
        raise InputError(f'device = "{named}"', cause, 'device="cuda" or device="cpu"')
    return device


class _Slot:
    """Memory for a batch: page-locked on the host, and on the device."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._there = DeviceSlot(device, stream)
        self._locked = Rooms(pin_memory=True)
        self._leaves: list[Any] = []
        self._spec: TreeSpec | None = None
        self._batch: Any = None
        self._made: torch.cuda.Event | None = None

    def pack(self, item: Any) -> None:
        leaves, self._spec = tree_flatten(item)
        made = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_cuda]
        self._made = torch.cuda.current_stream(made[0].device).record_event() if made else None
        self._leaves = [self._page_locked(number, leaf) for number, leaf in enumerate(leaves)]

    def send(self, transform: Callable[[Any], Any] | None) -> None:
        """Queue the copies behind the last use of this memory."""
        assert self._spec is not None
        if self._made:
            self._stream.wait_event(self._made)
        places = [number for number, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor)]
        sent = self._there.send([self._leaves[number] for number in places])
        for number, tensor in zip(places, sent, strict=True):
            self._leaves[number] = tensor
        self._batch = tree_unflatten(self._leaves, self._spec)
        if transform:
            with torch.cuda.stream(self._stream):
                self._batch = transform(self._batch)
            self._there.also_sent()

    def hand_over(self) -> Any:
        """The batch, for work on the current stream."""
        self._there.hand_over()
        current = torch.cuda.current_stream(self._stream.device)
        # What `transform` made is the allocator's again when it is dropped here.
        tree_map_only(Tensor, lambda tensor: tensor.record_stream(current) if tensor.is_cuda else None, self._batch)
        return self._batch

    def used(self) -> None:
        """All that reads it is queued."""
        self._there.used()
        self._there.wait_sent()
        self._leaves = []  # what `transform` made stays until the stream has waited for its last use, in `send`

    def _page_locked(self, number: int, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.device.type != "cpu" or leaf.is_pinned():
            return leaf
        return self._locked.copy(number, leaf)
