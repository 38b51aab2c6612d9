"""Memory on a GPU for the batches that go there, used again and again."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

_WHOLE: Mapping[int, Sequence[slice]] = MappingProxyType({})


class DeviceSlot:
    """Room for one batch on a device, filled on a stream of its own while another batch is in use.

    Both directions wait: a copy for the work that read what was there, and the work for the copy.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._device = device
        self._stream = stream
        self._rooms = Rooms(device=device)
        self._began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._sent: torch.cuda.Event | None = None
        self._used: torch.cuda.Event | None = None

    def send(self, tensors: Sequence[Tensor], parts: Mapping[int, Sequence[slice]] = _WHOLE) -> list[Tensor]:
        """Queue copies of tensors of the host; those on a device already stay what they are.

        From page-locked memory the host does not wait; that memory is free again after `wait_sent`.

        Args:
            parts: the rows that are copied of a tensor, by its number; of others all are.
        """
        if self._used:
            self._stream.wait_event(self._used)
        with torch.cuda.stream(self._stream):
            self._began.record()
            sent = [
                self._rooms.copy(number, tensor, parts.get(number)) if tensor.device.type == "cpu" else tensor
                for number, tensor in enumerate(tensors)
            ]
            self._sent = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._sent.record()
        return sent

    def also_sent(self) -> None:
        """More work on the stream belongs to the batch."""
        self._sent = self._stream.record_event()

    def hand_over(self) -> None:
        """What is queued on the current stream from now on may read the batch."""
        assert self._sent is not None
        torch.cuda.current_stream(self._device).wait_event(self._sent)

    def wait_sent(self) -> None:
        """Wait on the host until the batch is there."""
        assert self._sent is not None
        self._sent.synchronize()

    @property
    def copy_seconds(self) -> float:
        """That the last copies took, once they are there."""
        assert self._sent is not None
        return float(self._began.elapsed_time(self._sent)) / 1000

    def wait_unused(self) -> None:
        """Wait on the host until nothing reads the batch that was there before."""
        if self._used:
            self._used.synchronize()

    @property
    def is_unused(self) -> bool:
        """Whether nothing reads the last batch any more; costs no wait."""
        return self._used is None or bool(self._used.query())  # type: ignore[no-untyped-call]

    def used(self) -> None:
        """All that reads the batch is queued on the current stream."""
        self._used = torch.cuda.current_stream(self._device).record_event()


class Rooms:
    """Memory that is kept for tensors, one piece by number; it moves only if a larger one comes."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._memory: dict[int, Tensor] = {}
        self._kept: dict[int, tuple[Any, Tensor]] = {}

    def copy(self, number: int, tensor: Tensor, rows: Sequence[slice] | None = None) -> Tensor:
        """A copy in the room of this number, laid out as `tensor` is; of these rows alone, if any are named."""
        kind = (tensor.shape, tensor.dtype, tensor.stride())
        known, room = self._kept.get(number, (None, tensor))
        if known != kind:
            room = self._room(number, torch.empty_like(tensor, device="meta"))
            self._kept[number] = kind, room
        if rows is None:
            return room.copy_(tensor.detach(), non_blocking=True)
        for part in rows:
            room[part].copy_(tensor.detach()[part], non_blocking=True)
        return room

    def _room(self, number: int, like: Tensor) -> Tensor:
        memory = self._memory.get(number)
        with torch.inference_mode(False):  # later passes may be of a training
            if memory is None or memory.numel() < like.nbytes:
                memory = self._memory[number] = torch.empty(like.nbytes, dtype=torch.uint8, **self._options)
            room = memory[: like.nbytes].view(like.dtype).as_strided(like.shape, like.stride())
        room.is_room = True  # type: ignore[attr-defined]
        return room


Addresses = tuple[tuple[int, tuple[int, ...]], ...]


def addresses(tensors: Sequence[Any]) -> Addresses:
    """Where the tensors of a batch lie and how they are laid out, if all lie in rooms; empty if not."""
    if all(getattr(tensor, "is_room", False) for tensor in tensors):
        return tuple((tensor.data_ptr(), tensor.stride()) for tensor in tensors)
    return ()
