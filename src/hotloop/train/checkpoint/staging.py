"""Copies of a state in the host's memory, made while the training goes on."""

from collections.abc import Sequence
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
_ROOM_SHARE = 0.05
"""Of a GPU's memory, which stays free for the training."""


@dataclass
class Staged:
    """What is in the memory, or on its way there.

    Attributes:
        blocks: place and size of each, in bytes, in the order in which they were given.
    """

    blocks: list[tuple[int, int]]
    event: Any = None
    sources: list[Tensor] = field(default_factory=list)

    def ready(self) -> bool:
        """Whether all of it is there."""
        if self.event is not None and not self.event.query():
            return False
        self.sources.clear()
        return True

    def wait(self) -> None:
        """Until it is."""
        if self.event is not None:
            self.event.synchronize()
        self.sources.clear()


class Staging:
    """Memory for one state at a time.

    Attributes:
        memory: which another process may map; another one after a state that did not fit.
    """

    def __init__(self) -> None:
        self.memory: HostMemory | None = None
        self._stream: Any = None

    def copy(self, texts: Sequence[bytes], parts: Sequence[Part]) -> Staged:
        """Begin to copy: the state may change as soon as this returns.

        On a GPU it is copied there first, 1 ms for 2 GB, and from there to the host while the next steps compute. Where
        the GPU has no room for that, this returns when all is on the host: 1 s for 50 GB.
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
            self.memory = HostMemory(max(_LEAST_BYTES, int(_SPARE * size_bytes)), locked)
        return self.memory

    def _copied(self, blocks: list[tuple[int, int]], places: list[Tensor], tensors: list[Tensor]) -> Staged:
        on_gpu = [number for number, tensor in enumerate(tensors) if tensor.is_cuda]
        for number, tensor in enumerate(tensors):
            if not tensor.is_cuda:
                places[number].copy_(tensor)
        if not on_gpu:
            return Staged(blocks)
        device = tensors[on_gpu[0]].device
        apart = sum(tensors[number].nbytes for number in on_gpu) <= _room(device)
        if apart:
            for number in on_gpu:
                tensors[number] = tensors[number].clone(memory_format=torch.contiguous_format)
        self._stream = self._stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            for number in on_gpu:
                places[number].copy_(tensors[number], non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        staged = Staged(blocks, event, [tensors[number] for number in on_gpu])
        if not apart:
            staged.wait()
        return staged

    def close(self) -> None:
        """Let go of the memory."""
        if self.memory:
            self.memory.close()
        self.memory = None


def _room(device: torch.device) -> float:
    free, total = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + kept - _ROOM_SHARE * total
