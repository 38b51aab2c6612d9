"""Processes that train one model together: what they have to agree on when memory runs out on one of them."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

_CAUTIOUS_WINDOWS = 2


class PeerOutOfMemory(torch.OutOfMemoryError):
    """Memory ran out on another rank."""


class Ranks:
    """The ranks of a `DistributedDataParallel` model; of any other model this process alone.

    A rank that runs out of memory within a backward pass leaves the others waiting for its gradients. Therefore the
    first windows, and the first after each change of the pieces' size, are cautious: gradients stay where they are
    until all ranks have said that theirs are complete, and are averaged then. After those, memory holds what the same
    shapes need, and gradients are averaged while backward runs.

    Args:
        recover: whether a window is repeated when memory runs out; without, no window is cautious.

    Attributes:
        cautious: whether the present window is.
    """

    def __init__(self, model: nn.Module, recover: bool) -> None:
        self._model = model if isinstance(model, DistributedDataParallel) else None
        self._recover = recover
        self._left = _CAUTIOUS_WINDOWS

    @property
    def several(self) -> bool:
        return self._model is not None and distributed.get_world_size(self._model.process_group) > 1

    @property
    def cautious(self) -> bool:
        return self._recover and self.several and self._left > 0

    def without_sync(self) -> AbstractContextManager[object]:
        """Keep gradients where they are in this block's backward pass."""
        return self._model.no_sync() if self._model is not None else nullcontext()

    def agree(self) -> None:
        """Wait until all ranks have their gradients of a cautious window, and average them.

        Raises:
            PeerOutOfMemory: another rank ran out of memory.
        """
        if self._any_failed(False):
            raise PeerOutOfMemory("another rank ran out of memory")
        assert self._model is not None
        group = self._model.process_group
        size = distributed.get_world_size(group)
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                distributed.all_reduce(parameter.grad, group=group)
                parameter.grad.div_(size)

    def failed(self, error: BaseException) -> None:
        """Tell the others of an error that they do not know of."""
        if self.cautious and not isinstance(error, PeerOutOfMemory):
            self._any_failed(True)

    def window_done(self) -> None:
        """Count a window."""
        self._left = max(0, self._left - 1)

    def start_again(self) -> None:
        """The next windows are of another size."""
        self._left = _CAUTIOUS_WINDOWS

    def _any_failed(self, own: bool) -> bool:
        assert self._model is not None
        flag = torch.tensor(float(own), device=next(self._model.parameters()).device)
        distributed.all_reduce(flag, op=distributed.ReduceOp.MAX, group=self._model.process_group)
        return bool(flag.item())
