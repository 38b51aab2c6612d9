"""Errors of cards (Xid), as the driver tells them while they happen."""

import ctypes
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Event, Lock, Thread
from typing import Any

_WAIT_SECONDS = 1.0
"""For an error, before it is looked whether to go on."""
_REGISTER_SECONDS = 5.0
"""For all cards to say that they will tell; who is late is heard from then on."""
_PAUSE_SECONDS = 0.5
"""After a wait that failed, and for the thread to end."""


class Xids:
    """Counts the errors of cards from now on, on a thread that `close` ends.

    Args:
        nvml: the module pynvml, initialised.
        indexes: of the cards.
        told: each error, a card's index and a number, on that thread.
    """

    def __init__(
        self, nvml: Any, indexes: Sequence[int], now: Callable[[], float] = time.time,
        told: Callable[[int, str], None] = lambda index, xid: None,
    ) -> None:  # fmt: skip
        self._nvml, self._now, self._told = nvml, now, told
        self._lock, self._closed = Lock(), Event()
        self._counts: dict[int, Counter[str]] = defaultdict(Counter)
        self._times: dict[int, dict[str, float]] = defaultdict(dict)
        self._thread = Thread(target=self._watch, args=(indexes,), name="xids", daemon=True)
        self._thread.start()

    def of(self, index: int) -> tuple[dict[str, int], dict[str, float]]:
        """How often each error came to a card, and when last, in seconds since 1970."""
        with self._lock:
            return dict(self._counts[index]), dict(self._times[index])

    def close(self, wait_seconds: float = _PAUSE_SECONDS) -> None:
        """End it: a driver that waits is left alone, the thread ends by itself after that, or with the process."""
        self._closed.set()
        self._thread.join(wait_seconds)

    def _watch(self, cards: Sequence[int]) -> None:
        nvml = self._nvml
        try:
            events = nvml.nvmlEventSetCreate()
        except (nvml.NVMLError, AttributeError):
            return
        indexes: dict[int | None, int] = {}
        asking = [Thread(target=self._register, args=(events, each, indexes), name="xids", daemon=True)
                  for each in cards]  # fmt: skip
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join(_REGISTER_SECONDS / len(cards))
        while not self._closed.is_set() and (indexes or any(thread.is_alive() for thread in asking)):
            try:
                event = nvml.nvmlEventSetWait_v2(events, int(_WAIT_SECONDS * 1000))
            except nvml.NVMLError as error:
                if error.value != nvml.NVML_ERROR_TIMEOUT:
                    self._closed.wait(_PAUSE_SECONDS)
                continue
            # By the handle: a card that has just been lost would not tell its name any more.
            self._count(indexes.get(_address(event.device)), str(event.eventData))
        nvml.nvmlEventSetFree(events)

    def _register(self, events: Any, index: int, indexes: dict[int | None, int]) -> None:
        """On a thread of its own: a card that hangs keeps none of the others from telling their errors."""
        nvml = self._nvml
        with suppress(nvml.NVMLError):  # lost already, or a card that tells none
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
            indexes[_address(handle)] = index

    def _count(self, index: int | None, xid: str) -> None:
        if index is not None:
            with self._lock:
                self._counts[index][xid] += 1
                self._times[index][xid] = self._now()
            self._told(index, xid)


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value
