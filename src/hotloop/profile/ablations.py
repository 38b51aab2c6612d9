"""Parts of a step left out while its time is taken: what they cost is measured, not guessed.

What is computed meanwhile is of no use: a script goes on with it only to be timed, and is ended afterwards.
"""

import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from hotloop.attach.patches import Patches
from hotloop.profile.hooks import Hooks
from hotloop.profile.lines import script_line

_KEPT = 4
"""Batches of a loader that are given again and again."""


class Ablations:
    """Conditions to time steps under.

    Args:
        hooks: that watch the script.
    """

    def __init__(self, torch: Any, hooks: Hooks) -> None:
        self._torch = torch
        self._hooks = hooks
        self._batches: deque[Any] = deque(maxlen=_KEPT)
        self._moved: dict[tuple[int, str], Any] = {}

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Keep the loader's last batches."""

        def keep(iterator: Any, original: Callable[[], Any]) -> Any:
            batch = original()
            self._batches.append(batch)
            return batch

        self._hooks.stand_in = keep
        try:
            yield
        finally:
            self._hooks.stand_in = None

    @contextmanager
    def cached_batches(self) -> Iterator[None]:
        """The loader gives batches that it has given before; its workers fill what they have room for, and rest."""

        def again(iterator: Any, original: Callable[[], Any]) -> Any:
            self._batches.rotate(1)
            return _same_containers(self._batches[0])

        self._hooks.stand_in = again
        try:
            yield
        finally:
            self._hooks.stand_in = None

    @property
    def has_batches(self) -> bool:
        """Whether there is anything to give again."""
        return len(self._batches) > 0

    @contextmanager
    def batches_on_device(self) -> Iterator[None]:
        """The same, and what the script copies to a GPU has been there since the first time."""

        def remembered(original: Callable[..., Any]) -> Callable[..., Any]:
            def move(tensor: Any, *args: Any, **kwargs: Any) -> Any:
                if tensor.is_cuda:
                    return original(tensor, *args, **kwargs)
                key = (id(tensor), repr((args, kwargs)))
                if key not in self._moved:
                    moved = original(tensor, *args, **kwargs)
                    if not moved.is_cuda:
                        return moved
                    self._moved[key] = (tensor, moved)  # kept alive, so that its id stays its own
                return self._moved[key][1]

            return move

        patches = Patches()
        for name in ("to", "cuda"):
            patches.replace(self._torch.Tensor, name, remembered)
        try:
            with self.cached_batches():
                yield
        finally:
            patches.undo()
            self._moved.clear()

    @contextmanager
    def without_waits(self) -> Iterator[None]:
        """Values that a line has once read from a GPU are what it reads ever after; nothing is waited for.

        Decisions on tensors (`if tensor:`) are read anew: another outcome would be another training.
        """
        values: dict[tuple[str, str], Any] = {}

        def remembered(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
            def read(tensor: Any, *args: Any, **kwargs: Any) -> Any:
                if not tensor.is_cuda:
                    return original(tensor, *args, **kwargs)
                key = (script_line(sys._getframe(1)), f"{name}{tuple(tensor.shape)}")
                if key not in values:
                    values[key] = original(tensor, *args, **kwargs)
                return values[key]

            return read

        patches = Patches()
        for name in ("item", "cpu", "tolist", "__float__", "__int__"):
            patches.replace(self._torch.Tensor, name, partial(remembered, name))
        patches.replace(self._torch.cuda, "synchronize", lambda original: lambda *args, **kwargs: None)
        try:
            yield
        finally:
            patches.undo()

    @contextmanager
    def fewer_threads(self, ranks: int) -> Iterator[None]:
        """As many threads of torch's as this process has processors, shared among the ranks of this machine."""
        before = self._torch.get_num_threads()
        self._torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
        try:
            yield
        finally:
            self._torch.set_num_threads(before)


def _same_containers(batch: Any) -> Any:
    """The batch in lists and dicts of its own, as scripts take things out of them."""
    if isinstance(batch, dict):
        return type(batch)({key: _same_containers(value) for key, value in batch.items()})
    if type(batch) in (list, tuple):
        return type(batch)(_same_containers(value) for value in batch)
    return batch
