"""Copies of a state in the host's memory, made while the training goes on."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hotloop.train.checkpoint.parts import Part
from hotloop.train.host_memory import HostMemory

_ALIGNMENT = 64
_SPARE = 1.02
"""States grow by a few bytes, as numbers in them get longer."""
_LEAST_BYTES = 1 << 16
_TEXT_BYTES = 1 << 20
"""What a state has besides large tensors, as a rule."""
_ROOM_SHARE = 0.05
"""Of a GPU's memory, which stays free for the training."""


@dataclass
class Staged:
    """What is in the memory, or on its way there.

    Attributes:
        blocks: place and size of each, in bytes, in the order in which they were given.
    """

    blocks: list[tuple[int, int]]
    events: list[Any] = field(default_factory=list)
    sources: list[Tensor] = field(default_factory=list)

    def ready(self) -> bool:
        """Whether all of it is there."""
        if not all(event.query() for event in self.events):
            return False
        self.sources.clear()
        return True

    def wait(self) -> None:
        """Until it is."""
        for event in self.events:
            event.synchronize()
        self.sources.clear()


class Staging:
    """Memory for one state at a time.

    Args:
        warn: told, in a line, if memory for a GPU cannot be locked.

    Attributes:
        memory: which another process may map; another one after a state that did not fit.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self.memory: HostMemory | None = None
        self._warn = warn
        self._streams: dict[torch.device, Any] = {}
        self._copied_bytes: dict[torch.device, int] = {}  # by copies that the allocator has kept since

    def reserve(self, tensors: Sequence[Tensor]) -> None:
        """Take memory for as much as these and the texts beside them: to lock it takes seconds for tens of GB."""
        size = sum(-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors)
        self._room_for(size + _TEXT_BYTES, any(tensor.is_cuda for tensor in tensors))

    def copy(self, texts: Sequence[bytes], parts: Sequence[Part]) -> Staged:
        """Begin to copy: the state may change as soon as this returns.

        On a GPU it is copied there first, 1 ms for 2 GB, and from there to the host while the next steps compute. What
        the GPU has no room for is on the host when this returns: 1 s for 25 GB if four cards of a host copy at once.
        """
        sizes = [len(text) for text in texts] + [part.tensor.nbytes for part in parts]
        blocks, end = [], 0
        for size in sizes:
            blocks.append((end, size))
            end = -(-(end + size) // _ALIGNMENT) * _ALIGNMENT
        memory = self._room_for(end, any(part.tensor.is_cuda for part in parts))
        for (start, size), text in zip(blocks, texts, strict=False):
            memory.bytes[start : start + size] = memoryview(text)
        places = []
        for (start, size), part in zip(blocks[len(texts) :], parts, strict=True):
            block = torch.from_numpy(memory.bytes[start : start + size])
            places.append(block.view(part.tensor.dtype).view(part.tensor.shape))
        return self._copied(blocks, places, [part.tensor.detach() for part in parts])

    def _room_for(self, size_bytes: int, locked: bool) -> HostMemory:
        if self.memory is None or self.memory.bytes.nbytes < size_bytes:
            self.close()
            self.memory = HostMemory(max(_LEAST_BYTES, int(_SPARE * size_bytes)), locked, self._warn)
        return self.memory

    def _copied(self, blocks: list[tuple[int, int]], places: list[Tensor], tensors: list[Tensor]) -> Staged:
        staged = Staged(blocks)
        for device in {tensor.device for tensor in tensors}:
            here = [number for number, tensor in enumerate(tensors) if tensor.device == device]
            own_places, own = [places[number] for number in here], [tensors[number] for number in here]
            if device.type == "cuda":
                self._copy_from(device, own_places, own, staged)
            else:
                for place, tensor in zip(own_places, own, strict=True):
                    place.copy_(tensor)
        return staged

    def _copy_from(self, device: torch.device, places: list[Tensor], tensors: list[Tensor], staged: Staged) -> None:
        copies = self._copies(device, tensors)
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for place, tensor, copy in zip(places, tensors, copies, strict=True):
                if copy is None:
                    place.copy_(tensor, non_blocking=True)
            may_change = torch.cuda.Event()  # type: ignore[no-untyped-call]
            may_change.record(stream)
            for place, copy in zip(places, copies, strict=True):
                if copy is not None:
                    place.copy_(copy, non_blocking=True)
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record(stream)
        staged.sources += [copy for copy in copies if copy is not None]
        staged.events.append(ready)
        may_change.synchronize()

    def _copies(self, device: torch.device, tensors: list[Tensor]) -> list[Tensor | None]:
        """Of tensors on the GPU, where it has room. What the allocator keeps is no room, as the next step wants it, but
        for what the copies before have left: steps have found theirs beside it.
        """
        free, total = torch.cuda.mem_get_info(device)
        left = self._copied_bytes.get(device, 0)
        room = free + min(left, _kept_bytes(device)) - _ROOM_SHARE * total
        copies: list[Tensor | None] = [None] * len(tensors)
        with suppress(torch.OutOfMemoryError):
            for number, tensor in enumerate(tensors):
                if tensor.nbytes <= room:
                    copies[number] = tensor.clone(memory_format=torch.contiguous_format)
                    room -= tensor.nbytes
        self._copied_bytes[device] = max(left, sum(copy.nbytes for copy in copies if copy is not None))
        return copies

    def close(self) -> None:
        """Let go of the memory."""
        if self.memory:
            self.memory.close()
        self.memory = None


def _kept_bytes(device: torch.device) -> int:
    """Of a GPU, by torch's allocator, and free."""
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
