"""NVML without a driver: the module pynvml with invented cards behind its functions; structures and errors are real."""

# ruff: noqa: N802 - functions are named as NVML's

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, Queue
from threading import Event
from types import SimpleNamespace as Values
from typing import Any

import pynvml

LOST = pynvml.NVML_ERROR_GPU_IS_LOST
ABSENT = pynvml.NVML_ERROR_NOT_SUPPORTED
NA = 0xFFFFFFFFFFFFFFFF


def error(number: int) -> Exception:
    made: Exception = pynvml.NVMLError(number)
    return made


def working(index: int) -> dict[str, Any]:
    """What a card answers, by the function's name; a callable gets the function's further arguments."""
    return {
        "nvmlDeviceGetUUID": f"GPU-{index}",
        "nvmlDeviceGetName": "NVIDIA H200",
        "nvmlDeviceGetPciInfo": Values(busId=f"00000000:{index:02X}:00.0"),
        "nvmlDeviceGetMemoryInfo": Values(used=10, total=100, free=90),
        "nvmlDeviceGetUtilizationRates": Values(gpu=50, memory=25),
        "nvmlDeviceGetPowerUsage": 345_000,
        "nvmlDeviceGetEnforcedPowerLimit": 700_000,
        "nvmlDeviceGetTotalEnergyConsumption": 5_000,
        "nvmlDeviceGetTemperature": 61,
        "nvmlDeviceGetCurrentClocksEventReasons": 0x1 | 0x2 | 0x4 | 0x20,
        "nvmlDeviceGetClockInfo": lambda clock: {1: 1500, 2: 3200}[clock],
        "nvmlDeviceGetMaxClockInfo": lambda clock: {1: 1980, 2: 3201}[clock],
        "nvmlDeviceGetTotalEccErrors": lambda kind, counter: 10 * kind + counter,
        "nvmlDeviceGetRemappedRows": (1, 2, 1, 0),
        "nvmlDeviceGetNvLinkState": lambda link: [1, 1, 0][link] if link < 3 else error(ABSENT),
        "nvmlDeviceGetCurrPcieLinkGeneration": 5,
        "nvmlDeviceGetCurrPcieLinkWidth": 16,
        "nvmlDeviceGetPcieReplayCounter": 7,
        "nvmlDeviceGetComputeRunningProcesses": [Values(pid=1, usedGpuMemory=4), Values(pid=2, usedGpuMemory=None)],
        "nvmlDeviceGetGraphicsRunningProcesses": [],
        "nvmlDeviceGetMigMode": (0, 0),
    }


@dataclass
class FakeCard:
    """A card.

    Attributes:
        answers: by function; what is not there is not supported.
        fields: of nvmlDeviceGetFieldValues, by (number, scope): unsigned 64 bits.
        activity: percents by GPM's metrics; None: the card does not count.
        hangs: cleared: its calls wait until it is set.
        gone: every call fails with this error.
    """

    answers: dict[str, Any]
    fields: dict[tuple[int, int], int] = field(default_factory=dict)
    activity: dict[int, float] | None = None
    hangs: Event = field(default_factory=Event)
    gone: int = 0
    calls: int = 0

    def __post_init__(self) -> None:
        self.hangs.set()


class FakeNvml:
    """Stands for the module."""

    def __init__(self, *cards: FakeCard) -> None:
        self.cards = list(cards)
        self.starts: list[int] = []
        """Errors of nvmlInit, first to last; without one it works."""
        self.events: Queue[tuple[int, int]] = Queue()
        """(card, Xid)"""
        self.freed = False

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvmlDevice"):
            return getattr(pynvml, name)
        return lambda handle, *arguments: self._answer(handle, name, arguments)

    def nvmlInit(self) -> None:
        if self.starts:
            raise error(self.starts.pop(0))

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.159.04"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 13000

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        self._reach(self.cards[index])
        return ctypes.cast(index + 1, pynvml.c_nvmlDevice_t)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:
        found = [index for index, card in enumerate(self.cards) if card.answers["nvmlDeviceGetUUID"] == uuid]
        if not found:
            raise error(pynvml.NVML_ERROR_NOT_FOUND)
        return self.nvmlDeviceGetHandleByIndex(found[0])

    def nvmlDeviceGetIndex(self, handle: Any) -> int:
        return self.cards.index(self._of(handle))

    def nvmlDeviceGetFieldValues(self, handle: Any, asked: list[tuple[int, int]]) -> list[Any]:
        card = self._of(handle)
        values = []
        for key in asked:
            value = pynvml.c_nvmlFieldValue_t()
            value.valueType, value.nvmlReturn = 3, 0 if key in card.fields else ABSENT
            value.value.ullVal = card.fields.get(key, 0)
            values.append(value)
        return values

    def nvmlDeviceRegisterEvents(self, handle: Any, kind: int, events: Any) -> None:
        self._of(handle)

    def nvmlGpmQueryDeviceSupport(self, handle: Any) -> Any:
        return Values(isSupportedDevice=self._of(handle).activity is not None)

    def nvmlGpmSampleAlloc(self) -> Any:
        return ctypes.cast(1, pynvml.c_nvmlGpmSample_t)

    def nvmlGpmSampleGet(self, handle: Any, sample: Any) -> Any:
        self._sampled = self._of(handle)
        return sample

    def nvmlGpmMetricsGet(self, asked: Any) -> Any:
        for answer in asked.metrics[: asked.numMetrics]:
            known = self._sampled.activity or {}
            answer.nvmlReturn = 0 if answer.metricId in known else ABSENT
            answer.value = known.get(answer.metricId, 0.0)
        return asked

    def nvmlEventSetCreate(self) -> str:
        return "events"

    def nvmlEventSetWait_v2(self, events: str, milliseconds: int) -> Any:
        try:
            card, xid = self.events.get(timeout=0.01)
        except Empty:
            raise error(pynvml.NVML_ERROR_TIMEOUT) from None
        return Values(device=ctypes.cast(card + 1, pynvml.c_nvmlDevice_t), eventData=xid)

    def nvmlEventSetFree(self, events: str) -> None:
        self.freed = True

    def _of(self, handle: Any) -> FakeCard:
        card = self.cards[(ctypes.cast(handle, ctypes.c_void_p).value or 0) - 1]
        self._reach(card)
        return card

    def _reach(self, card: FakeCard) -> None:
        card.calls += 1
        card.hangs.wait()
        if card.gone:
            raise error(card.gone)

    def _answer(self, handle: Any, name: str, arguments: tuple[Any, ...]) -> Any:
        answer = self._of(handle).answers.get(name, error(ABSENT))
        if isinstance(answer, Callable):  # type: ignore[arg-type]
            answer = answer(*arguments)
        if isinstance(answer, Exception):
            raise answer
        return answer
