"""Ranks that switch accelerations at the same steps decide alike."""

import json
from datetime import timedelta

import torch

_PATIENCE = timedelta(minutes=1)
_PREFIX = "hotloop"


class Ranks:
    """All processes of a training, asked by each at the same points.

    Attributes:
        number: of them.
    """

    def __init__(self) -> None:
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        self.number = torch.distributed.get_world_size() if distributed else 1
        self._asked = 0

    def largest(self, *figures: float) -> tuple[float, ...]:
        """Each figure of the rank where it is largest. Goes through the store by which the ranks have found each other,
        as a collective of ours could meet one of the script's.
        """
        if self.number == 1:
            return figures
        from torch.distributed.distributed_c10d import _get_default_store

        store, rank = _get_default_store(), torch.distributed.get_rank()
        self._asked += 1
        keys = [f"{_PREFIX}/{self._asked}/{each}" for each in range(self.number)]
        store.set(keys[rank], json.dumps(figures))
        store.wait(keys, _PATIENCE)
        return tuple(max(column) for column in zip(*(json.loads(store.get(key)) for key in keys), strict=True))

    def any(self, one: bool) -> bool:
        """Whether it is so in any of them."""
        return bool(self.largest(float(one))[0])
