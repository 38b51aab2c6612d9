"""Memory of the host that other processes map, and that a GPU copies from and to by itself."""

import mmap
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import numpy as np
import torch


@contextmanager
def page_locked(memory: np.ndarray) -> Iterator[None]:
    """Let the GPU copy from `memory` by itself while this is open; without the right to, copies are merely slower."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = memory.ctypes.data
    locked = runtime.cudaHostRegister(address, memory.nbytes, 0) == runtime.cudaError.success
    if not locked:
        with suppress(RuntimeError):  # the next launch on the GPU raises that error, whoever's it is: let it be this
            torch.zeros(1, device="cuda")
    try:
        yield
    finally:
        if locked:
            for number in range(torch.cuda.device_count()):
                torch.cuda.synchronize(number)
            runtime.cudaHostUnregister(address)


class HostMemory:
    """Anonymous memory (memfd): it has no name to clean up, and is not bounded by the size of /dev/shm.

    Args:
        locked: for a GPU.

    Attributes:
        descriptor: by which a child maps it.
        bytes: uint8 (size_bytes,).
    """

    def __init__(self, size_bytes: int, locked: bool) -> None:
        self.descriptor = os.memfd_create("hotloop-state")
        self._open = ExitStack()
        self._open.callback(os.close, self.descriptor)
        try:
            os.ftruncate(self.descriptor, size_bytes)
            self.bytes = np.frombuffer(mmap.mmap(self.descriptor, size_bytes), np.uint8)
            if locked:
                self._open.enter_context(page_locked(self.bytes))
        except BaseException:
            self._open.close()
            raise

    def close(self) -> None:
        """Let go of it once the last view of it is gone."""
        self._open.close()
        self.bytes = np.zeros(0, np.uint8)
