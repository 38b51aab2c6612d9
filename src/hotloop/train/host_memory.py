"""Memory of the host that other processes map, and that a GPU copies from and to by itself."""

import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import numpy as np
import torch

from hotloop.core.units import format_bytes


@contextmanager
def page_locked(memory: np.ndarray) -> Iterator[str]:
    """Let the GPU copy from and to `memory` by itself while this is open. Why it cannot; empty if it can."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch_c: Any = torch._C
    address = memory.ctypes.data
    code = runtime.cudaHostRegister(address, memory.nbytes, 0)
    locked = code == runtime.cudaError.success
    if not locked:
        with suppress(RuntimeError):  # the next launch on the GPU raises that error, whoever's it is: let it be this
            torch.zeros(1, device="cuda")
    try:
        yield "" if locked else f"{format_bytes(memory.nbytes)}, {runtime.cudaGetErrorString(code)}"
    finally:
        if locked:
            for number in range(torch.cuda.device_count()):
                # Of another rank's GPU that would make a context: half a GB where there may be no room for it.
                if torch_c._cuda_hasPrimaryContext(number):
                    torch.cuda.synchronize(number)
            runtime.cudaHostUnregister(address)


def not_locked(what: str, why: str) -> str:
    """In a line, that memory for `what` is not locked, what that costs, and what to type."""
    return (
        f"the host's memory for {what} cannot be page-locked ({why}): copies between it and the GPU are slower, and "
        "the training waits for them; let it lock memory: ulimit -l unlimited, in a container --ulimit memlock=-1"
    )


class HostMemory:
    """Anonymous memory (memfd): it has no name to clean up, and is not bounded by the size of /dev/shm.

    Args:
        locked: for a GPU.
        warn: told, in a line, if it cannot be locked.

    Attributes:
        descriptor: by which a child maps it.
        bytes: uint8 (size_bytes,).
    """

    def __init__(self, size_bytes: int, locked: bool, warn: Callable[[str], None]) -> None:
        self.descriptor = os.memfd_create("hotloop-state")
        self._open = ExitStack()
        self._open.callback(os.close, self.descriptor)
        try:
            os.ftruncate(self.descriptor, size_bytes)
            self.bytes = np.frombuffer(mmap.mmap(self.descriptor, size_bytes), np.uint8)
            if locked and (why := self._open.enter_context(page_locked(self.bytes))):
                warn(not_locked("checkpoints", why))
        except BaseException:
            self._open.close()
            raise

    def close(self) -> None:
        """Let go of it once the last view of it is gone."""
        self._open.close()
        self.bytes = np.zeros(0, np.uint8)
