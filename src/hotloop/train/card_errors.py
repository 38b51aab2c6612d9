"""Errors of the GPU that this process trains on (Xid), told while they happen, and its uncorrectable memory errors.

https://docs.nvidia.com/deploy/xid-errors/
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from threading import Event, Thread
from types import TracebackType
from typing import Any

import torch

from hotloop.attach.live import gpu_uuid
from hotloop.core.xids import Xids
from hotloop.doctor.checks.cards import RECOVERY_XID, finding_of_xid
from hotloop.doctor.finding import catalogue

_KINDS = {"xid": "a serious error", "xid-contained": "an error that it has contained", "xid-application": "a program's"}


class CardErrors:
    """A context in which each kind of error of a card is told once.

    The driver is asked on threads: one that hangs keeps nothing else from going on.

    Args:
        nvml: the module pynvml.
        uuid: of the card.
        tell: a line, from another thread.
    """

    def __init__(self, nvml: Any, uuid: str, tell: Callable[[str], None]) -> None:
        self._nvml, self._uuid, self._tell = nvml, uuid, tell
        self._handle: Any = None
        self._xids: Xids | None = None
        self._seen: set[str] = set()
        self._closed = Event()

    def __enter__(self) -> "CardErrors":
        Thread(target=self._begin, name="card-errors", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        if self._xids:
            self._xids.close(wait_seconds=0.0)

    def _begin(self) -> None:
        nvml = self._nvml
        with suppress(nvml.NVMLError):  # none to ask, or not for this user
            nvml.nvmlInit()
            self._handle = nvml.nvmlDeviceGetHandleByUUID(self._uuid)
            index = nvml.nvmlDeviceGetIndex(self._handle)
            self._xids = Xids(nvml, [index], told=self._note)
            if self._closed.is_set():  # before it was known
                self._xids.close(wait_seconds=0.0)

    def _note(self, index: int, xid: str) -> None:
        if xid in self._seen:
            return
        self._seen.add(xid)
        finding = finding_of_xid(int(xid))
        known, card = catalogue()[finding], f"GPU {index} ({self._uuid})"
        if int(xid) == RECOVERY_XID:
            self._tell(f"{card} tells whether it is to be recovered (Xid {xid}). Fix: sudo dmesg | grep Xid")
            return
        self._tell(f"{card} tells {_KINDS[finding]} (Xid {xid}); {known.why} Fix: {known.fix}")
        nvml = self._nvml  # asked after that: it may hang now
        with suppress(nvml.NVMLError):  # without ECC, or lost
            kind, since = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            if number := nvml.nvmlDeviceGetTotalEccErrors(self._handle, kind, since):
                self._tell(f"{card} has {number} uncorrectable errors of its memory since the driver was loaded")


def card_errors(device: torch.device, tell: Callable[[str], None]) -> AbstractContextManager[object]:
    """Those of a training's GPU; nothing on a CPU, or where NVML's module is not installed."""
    uuid = gpu_uuid(torch, device)
    with suppress(ImportError):
        import pynvml

        return CardErrors(pynvml, uuid, tell) if uuid else nullcontext()
    return nullcontext()
