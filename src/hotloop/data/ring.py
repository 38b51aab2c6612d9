"""A ring of batches in shared memory that worker processes write and the training process reads.

The memory is anonymous (memfd): it has no name to clean up, goes when the last process that maps it goes, even by
SIGKILL, and is not bounded by the size of /dev/shm, which containers keep at 64 MiB.
"""

import mmap
import os
from collections.abc import Mapping
from multiprocessing import reduction
from typing import Any

import numpy as np

from hotloop.core.errors import InputError
from hotloop.core.units import format_bytes
from hotloop.data.dataset import Field

_ALIGNMENT = 64
"""Bytes: a cache line, and enough for vector loads."""


class Ring:
    """`slots` batches of `batch_size` samples each. Travels to a spawned child as a file descriptor.

    Args:
        fields: shape and dtype of each array of a sample.
        batch_size: samples a slot holds.
        slots: batches that can be filled or read at the same time.

    Attributes:
        size_bytes: shared memory taken.

    Raises:
        InputError: the machine does not give so much.
    """

    def __init__(self, fields: Mapping[str, Field], batch_size: int, slots: int) -> None:
        self.fields = dict(fields)
        self.batch_size = batch_size
        self.slots = slots
        try:
            self._descriptor = os.memfd_create("hotloop-ring")
            try:
                os.ftruncate(self._descriptor, self.size_bytes)
                self._map()
            except BaseException:
                os.close(self._descriptor)
                raise
        except OSError as error:
            what = f"no {format_bytes(self.size_bytes)} of shared memory for {slots} batches of {batch_size} samples"
            fix = "make batches smaller (--set data.batch_size=N), or raise the limits (ulimit -f -v -n)"
            raise InputError(what, error.strerror or str(error), fix) from None

    @property
    def size_bytes(self) -> int:
        return self.slots * (self.batch_size + sum(self._field_bytes(field) for field in self.fields.values()))

    def slot(self, number: int) -> dict[str, np.ndarray]:
        """The arrays of slot `number`, each (batch_size, *shape); views, no copies."""
        return self._views[number]

    def done(self, number: int) -> np.ndarray:
        """Which samples of slot `number` a worker has left behind, bool (batch_size,); a view.

        Of a part that no worker has begun it says nothing: there it is what was before.
        """
        return self._done[number]

    @property
    def memory(self) -> np.ndarray:
        """All slots as bytes, uint8 (size_bytes,); a view."""
        return self._bytes

    def close(self) -> None:
        """Let go of the memory once the last view of it is gone."""
        self._views.clear()
        self._done.clear()
        self._bytes = np.zeros(0, np.uint8)
        os.close(self._descriptor)

    def _field_bytes(self, field: Field) -> int:
        size_bytes = self.batch_size * field.dtype.itemsize * int(np.prod(field.shape, dtype=np.int64))
        return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT

    def _map(self) -> None:
        memory = mmap.mmap(self._descriptor, self.size_bytes)
        self._bytes = np.frombuffer(memory, np.uint8)
        self._views: list[dict[str, np.ndarray]] = []
        offset = 0
        for _ in range(self.slots):
            views = {}
            for name, field in self.fields.items():
                views[name] = np.ndarray((self.batch_size, *field.shape), field.dtype, memory, offset)
                offset += self._field_bytes(field)
            self._views.append(views)
        self._done: list[np.ndarray] = list(np.ndarray((self.slots, self.batch_size), np.bool_, memory, offset))

    def __getstate__(self) -> dict[str, Any]:
        descriptor = reduction.DupFd(self._descriptor)
        return {"fields": self.fields, "batch_size": self.batch_size, "slots": self.slots, "descriptor": descriptor}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.fields, self.batch_size, self.slots = state["fields"], state["batch_size"], state["slots"]
        self._descriptor = state["descriptor"].detach()
        self._map()
