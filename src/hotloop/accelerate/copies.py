"""Batches on the GPU before the script asks for them there: its own `.to` and `.cuda` find them done."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from hotloop.accelerate.host_tensor import HostTensor
from hotloop.attach.patches import Patches

_KEPT = 4
"""Batches whose tensors are known at a time: two on their way, the present one, and one that is kept by the script."""


@dataclass(frozen=True)
class _Known:
    """A tensor of a batch.

    Attributes:
        place: of it in its batch.
    """

    tensor: Callable[[], Tensor | None]
    loader: Any
    place: int


@dataclass(frozen=True)
class _Sent:
    """A copy on its way.

    Attributes:
        version: of the tensor when it was copied: a script that has written into it since gets another copy.
    """

    tensor: Callable[[], Tensor | None]
    copy: Tensor
    version: int
    arrived: "torch.cuda.Event"


class Copies:
    """Learns which tensors of a loader's batches a script moves to a GPU, and moves them ahead on a stream of its own.

    Attributes:
        is_on: whether batches are sent ahead.
        count: copies that were there when they were asked for.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_on = False
        self.count = 0
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._moved: WeakKeyDictionary[Any, dict[int, torch.device]] = WeakKeyDictionary()
        self._batches: deque[dict[int, _Known]] = deque(maxlen=_KEPT)
        self._sent: dict[int, _Sent] = {}
        self._patches = Patches()
        for name in ("to", "cuda"):
            self._patches.replace(Tensor, name, self._move)

    def remove(self) -> None:
        """Tensors move by themselves again."""
        self._patches.undo()
        self._batches.clear()
        self._sent.clear()

    @property
    def is_ahead(self) -> bool:
        """Whether the next batch is wanted early."""
        return self.is_on

    def moved(self, loader: Any) -> Mapping[int, torch.device]:
        """Where the script moves the tensors of a loader's batches, by their places in these."""
        return self._moved.get(loader, {})

    def passed(self, loader: Any, batch: Any) -> None:
        """Note a batch's tensors, and send those that the script has moved of earlier batches."""
        if len(self._batches) == _KEPT:
            for name in self._batches[0]:
                self._sent.pop(name, None)
        known = {id(tensor): _Known(ref(tensor), loader, place) for place, tensor in enumerate(_tensors(batch))}
        self._batches.append(known)
        if self.is_on:
            places = self._moved.get(loader, {})
            for place, tensor in enumerate(_tensors(batch)):
                if place in places and type(tensor) is Tensor and tensor.is_pinned() and not tensor.is_inference():
                    self._send(tensor, places[place])

    def _send(self, tensor: Tensor, device: torch.device) -> None:
        with torch.cuda.stream(self._stream):
            copy = tensor.detach().to(device, non_blocking=True)
        self._sent[id(tensor)] = _Sent(ref(tensor), copy, tensor._version, self._stream.record_event())

    def _known(self, tensor: Tensor) -> _Known | None:
        alike = (batch[id(tensor)] for batch in self._batches if id(tensor) in batch)  # an id may be used again
        return next((found for found in alike if found.tensor() is tensor), None)

    def _move(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def move(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if isinstance(tensor, HostTensor):
                target = target_of(original.__name__, args, kwargs)
                here = tensor.moved() if target and target.type == "cuda" else tensor.values()
                return original(here, *args, **kwargs)
            plain = not (tensor.is_cuda or tensor.requires_grad or tensor.is_inference())
            known = self._known(tensor) if plain else None
            wanted = _destination(original.__name__, args, kwargs) if known else None
            if not known or not wanted:
                return original(tensor, *args, **kwargs)
            device, dtype = wanted
            self._moved.setdefault(known.loader, {})[known.place] = device
            sent = self._sent.pop(id(tensor), None)
            if not sent or sent.tensor() is not tensor or sent.version != tensor._version:
                return original(tensor, *args, **kwargs)
            if sent.copy.device != device:
                return original(tensor, *args, **kwargs)
            stream = torch.cuda.current_stream(device)
            stream.wait_event(sent.arrived)
            sent.copy.record_stream(stream)
            self.count += 1
            return sent.copy if dtype in (None, sent.copy.dtype) else sent.copy.to(dtype)

        return move


def target_of(name: str, args: Any, kwargs: Any) -> torch.device | None:
    """The device that a call of `Tensor.to` or `Tensor.cuda` names; None if it names none."""
    if name == "cuda":
        asked = args[0] if args else kwargs.get("device")
        return torch.device("cuda" if asked is None else asked if not isinstance(asked, int) else f"cuda:{asked}")
    other = args[0] if args else kwargs.get("other")
    if isinstance(other, Tensor):
        return other.device
    device, *_ = torch._C._nn._parse_to(*args, **{key: value for key, value in kwargs.items() if key != "copy"})
    return cast(torch.device | None, device)


def _destination(name: str, args: Any, kwargs: Any) -> tuple[torch.device, torch.dtype | None] | None:
    """Which GPU a call moves to, and what it makes of it; None if it is none of the plain ways."""
    if kwargs.get("copy") or kwargs.get("memory_format") or any(isinstance(each, Tensor) for each in args):
        return None
    device, dtype = target_of(name, args, kwargs), None
    if name == "to":
        _, dtype, _, layout = torch._C._nn._parse_to(*args, **{k: v for k, v in kwargs.items() if k != "copy"})
        if layout is not None:
            return None
    if device is None or device.type != "cuda":
        return None
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index), dtype


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from _tensors(value)
