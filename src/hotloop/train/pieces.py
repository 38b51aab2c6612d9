"""A batch that does not fit is trained on in pieces: how it is cut, and when whole batches are tried again."""

import copy
import gc
import traceback
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from hotloop.core.errors import HotloopError
from hotloop.core.units import format_bytes


def batch_size(batch: Any) -> int:
    """Samples in a batch: the length of its first tensor; 0 if it holds none."""
    leaves, _ = tree_flatten(dict(batch) if isinstance(batch, Mapping) else batch)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim]
    return len(tensors[0]) if tensors else 0


def cut(batch: Any, count: int) -> list[tuple[Any, float]]:
    """A batch as `count` pieces of nearly equal length, each with its share of the samples; views, no copies.

    Tensors as long as the batch are cut along their first dimension; all else goes whole to every piece.
    """
    size = batch_size(batch) if count > 1 else 0
    if size < 2:
        return [(batch, 1.0)]
    leaves, spec = tree_flatten(dict(batch) if isinstance(batch, Mapping) else batch)
    bounds = [size * number // count for number in range(count + 1)]
    pieces = []
    for start, end in pairwise(bounds):
        if end > start:
            parts = [
                leaf[start:end] if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == size else leaf
                for leaf in leaves
            ]
            pieces.append((_like(batch, tree_unflatten(parts, spec)), (end - start) / size))
    return pieces


def _like(batch: Any, piece: Any) -> Any:
    """The piece as another mapping than a dict if the batch is one: what tokenizers give has attributes."""
    if type(batch) is dict or not isinstance(batch, MutableMapping):
        return piece
    other = copy.copy(batch)
    other.update(piece)
    return other


class Pieces:
    """Into how many pieces batches are cut at present.

    Doubled when memory runs out, halved again after many steps without that, later each time it proves too early.

    Attributes:
        count: pieces of a batch as long as the one that did not fit; shorter ones need fewer.
    """

    def __init__(self, steps_before_growing: int = 1000) -> None:
        self.count = 1
        self._whole = 0
        self._patience = steps_before_growing
        self._calm = 0
        self._trying = False

    def size(self, most: int) -> int:
        """Samples of the largest piece of a batch of `most`."""
        return most if self.count == 1 else max(1, -(-self._whole // self.count))

    def of(self, batch: Any) -> int:
        """Into how many pieces to cut a batch."""
        if self.count == 1:
            return 1
        samples = batch_size(batch)
        return max(1, -(-samples // self.size(samples)))

    def halve(self, batch: Any, error: str) -> None:
        """Memory ran out on `batch`.

        Raises:
            HotloopError: a piece is a single sample already, or there is nothing to cut.
        """
        samples = batch_size(batch)
        if not samples:
            raise no_room(f"a {type(batch).__name__}, which cannot be cut into pieces, does not", error)
        if min(samples, self.size(samples)) < 2:
            raise no_room("a single sample does not", error)
        self.double(batch)

    def double(self, batch: Any) -> None:
        """Twice as many pieces, as another rank needs them for a batch like this."""
        if self._trying:
            self._patience *= 2
        self._trying, self._calm = False, 0
        if self.count == 1:
            self._whole = batch_size(batch)
        self.count *= 2

    def step_done(self) -> bool:
        """Count a step without trouble; whether the pieces have just been made larger."""
        if self.count == 1:
            return False
        self._calm += 1
        if self._calm < self._patience:
            return False
        self.count //= 2
        self._calm, self._trying = 0, True
        return True


_NO_ALLOCATION = "_STATUS_ALLOC_FAILED"
"""So cuBLAS, cuDNN and cuSPARSE end their names for memory that they did not get for themselves."""


@contextmanager
def memory_errors() -> Iterator[None]:
    """Raise what libraries say of memory that ran out, a plain RuntimeError, as torch raises its own."""
    try:
        yield
    except RuntimeError as error:
        if _NO_ALLOCATION not in str(error) or isinstance(error, torch.OutOfMemoryError):
            raise
        raise torch.OutOfMemoryError(str(error)) from error


def release(error: BaseException) -> None:
    """Free the tensors that a failed step's frames hold, and give unused memory back to the device."""
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__context__
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def no_room(what: str, error: str) -> HotloopError:
    """Words for memory that ran out where smaller pieces do not help; `what` "a single sample does not" fit."""
    used = ""
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        used = f"; {format_bytes(total - free)} of {format_bytes(total)} are in use"
    return HotloopError(
        f"{what} fit into the GPU's memory{used}",
        error.strip().splitlines()[0],
        '--set speed.activations="blocks", a smaller model or smaller samples; nvidia-smi shows who else uses the card',
    )
