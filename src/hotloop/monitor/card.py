"""One card, as NVML tells it. Each reading may be missing: WSL, MIG, vGPU and old cards leave many out.

Throughput of PCIe is not read: NVML measures for 40 ms a card to tell it.
"""

import math
import os
import pwd
import time
from collections import Counter
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

from hotloop.monitor.activity import Activity
from hotloop.monitor.numbers import known, scaled
from hotloop.monitor.reading import Card, Instance

_THROTTLE = {
    "power_cap": 0x4, "hardware_slowdown": 0x8, "thermal_software": 0x20, "thermal_hardware": 0x40, "power_brake": 0x80,
}  # fmt: skip
"""Of nvmlClocksEventReasons: being idle and clocks that were asked for are no throttling."""
_GONE = ("NVML_ERROR_GPU_IS_LOST", "NVML_ERROR_RESET_REQUIRED", "NVML_ERROR_GPU_NOT_FOUND")
_ALL_LINKS = 0xFFFFFFFF
_VALUES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Members of a field's value, by nvmlValueType_t."""
_SELDOM_SECONDS = 10.0
"""Less than the 15 s between Prometheus's scrapes by default: with those, nothing is old."""
_MOST_USERS = 16
_FIRST_NAMESPACE = 0xEFFFFFFC
"""The kernel's number of the process namespace that it begins with."""


class CardReader:
    """Reads one card. Holds what does not change, and the sample of the reading before. Not for several threads.

    Args:
        nvml: the module pynvml, initialised.
        user_of: the name of a process's user, "" where it is not known.
    """

    def __init__(
        self, nvml: Any, index: int, user_of: Callable[[int], str], clock: Callable[[], float] = time.monotonic
    ) -> None:  # fmt: skip
        self.uuid = ""
        self._clock = clock
        self._seldom: dict[str, tuple[float, Any]] = {}
        self._nvml, self._index, self._user_of = nvml, index, user_of
        self._gone = {getattr(nvml, name) for name in _GONE}
        self._handle: Any = None
        self._fixed: dict[str, Any] = {}
        self._links: tuple[int, ...] = ()
        self._causes: dict[str, int] = {}
        self._activity = Activity(nvml)

    def read(self) -> Card:
        """Read it; some milliseconds.

        Raises:
            NVMLError: it has fallen off the bus, or needs a reset.
        """
        # Each time: after a reset of the card the former handle is good for nothing.
        self._handle = self._nvml.nvmlDeviceGetHandleByIndex(self._index)
        memory = self._memory()
        if not self._fixed:
            self._read_fixed()
        nvml = self._nvml
        # One question for all fields: each is a way into the driver and back.
        hot, received, sent = self._fields([
            (nvml.NVML_FI_DEV_MEMORY_TEMP, 0), (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, _ALL_LINKS),
            (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, _ALL_LINKS),
        ])  # fmt: skip
        return Card(
            index=self._index, **self._fixed, **memory, **self._busy(), **self._power(), **self._clocks(hot),
            **self._health(), **self._nvlink(received, sent), **self._pcie(), **self._tenants(), **self._mig(),
        )  # fmt: skip

    def _ask(self, function: str, *arguments: Any) -> Any:
        """What a function of NVML gives for the card; None where this card, driver or pynvml does not tell."""
        try:
            return getattr(self._nvml, function)(self._handle, *arguments)
        except self._nvml.NVMLError as error:
            if error.value in self._gone:
                raise
            return None
        except AttributeError:
            return None

    def _ask_seldom(self, function: str) -> Any:
        """What the driver takes long to tell, of at most 10 s ago.

        On an H200: 3.3 ms for energy, which it keeps busy for, and 0.35 ms for replays and MIG; all others 0.2 ms.
        """
        now = self._clock()
        asked, told = self._seldom.get(function, (-math.inf, None))
        if now - asked >= _SELDOM_SECONDS:
            told = self._ask(function)
            self._seldom[function] = now, told
        return told

    def _memory(self) -> dict[str, Any]:
        """The first thing asked for: who does not know its memory for an unknown reason is gone."""
        try:
            memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        except self._nvml.NVMLError as error:
            if error.value in self._gone | {self._nvml.NVML_ERROR_UNKNOWN}:
                raise
            return {}
        return {"memory_used_bytes": known(memory.used), "memory_total_bytes": known(memory.total)}

    def _read_fixed(self) -> None:
        self.uuid = self._ask("nvmlDeviceGetUUID") or ""
        bus = self._ask("nvmlDeviceGetPciInfo")
        most = range(self._nvml.NVML_NVLINK_MAX_LINKS)
        self._links = tuple(link for link in most if self._ask("nvmlDeviceGetNvLinkState", link) is not None)
        causes = {
            "multiple_single_bit": self._nvml.NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS,
            "double_bit": self._nvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR,
        }
        told = {name: self._ask("nvmlDeviceGetRetiredPages", cause) for name, cause in causes.items()}
        self._causes = {name: causes[name] for name, pages in told.items() if pages is not None}
        sm, memory = self._nvml.NVML_CLOCK_SM, self._nvml.NVML_CLOCK_MEM
        self._fixed = {
            "uuid": self.uuid,
            "name": self._ask("nvmlDeviceGetName") or "",
            "bus_id": bus.busId if bus else "",
            "clocks_max_hertz": _given(
                sm=scaled(self._ask("nvmlDeviceGetMaxClockInfo", sm), 1e6),
                memory=scaled(self._ask("nvmlDeviceGetMaxClockInfo", memory), 1e6),
            ),
        }

    def _busy(self) -> dict[str, Any]:
        rates = self._ask("nvmlDeviceGetUtilizationRates")
        try:
            activity = self._activity.read(self._handle)
        except (self._nvml.NVMLError, AttributeError):
            activity = {}
        return {
            "utilization": scaled(rates and rates.gpu, 0.01),
            "memory_utilization": scaled(rates and rates.memory, 0.01),
            **activity,
        }

    def _power(self) -> dict[str, Any]:
        return {
            "power_watts": scaled(self._ask("nvmlDeviceGetPowerUsage"), 1e-3),
            "power_limit_watts": scaled(self._ask("nvmlDeviceGetEnforcedPowerLimit"), 1e-3),
            "energy_joules": scaled(self._ask_seldom("nvmlDeviceGetTotalEnergyConsumption"), 1e-3),
        }

    def _clocks(self, memory_celsius: float | None) -> dict[str, Any]:
        nvml = self._nvml
        reasons = self._ask("nvmlDeviceGetCurrentClocksEventReasons")
        if reasons is None:  # the name before driver 535
            reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        held = {} if known(reasons) is None else {name: bool(reasons & bit) for name, bit in _THROTTLE.items()}
        return {
            "clocks_hertz": _given(
                sm=scaled(self._ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM), 1e6),
                memory=scaled(self._ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM), 1e6),
            ),
            "throttled": held,
            "temperatures_celsius": _given(
                gpu=known(self._ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU)),
                memory=memory_celsius or None,  # cards without the sensor tell 0
            ),
        }

    def _health(self) -> dict[str, Any]:
        nvml = self._nvml
        kinds = {
            "corrected": nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED,
            "uncorrected": nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
        }
        counters = {"volatile": nvml.NVML_VOLATILE_ECC, "aggregate": nvml.NVML_AGGREGATE_ECC}
        errors = {
            (kind, counter): known(self._ask("nvmlDeviceGetTotalEccErrors", kind_id, counter_id))
            for kind, kind_id in kinds.items()
            for counter, counter_id in counters.items()
        }
        pages = {name: self._ask("nvmlDeviceGetRetiredPages", cause) for name, cause in self._causes.items()}
        corrected, uncorrected, pending, failed = self._ask("nvmlDeviceGetRemappedRows") or (None,) * 4
        return {
            "ecc_errors": {key: value for key, value in errors.items() if value is not None},
            "remapped_rows": _given(corrected=known(corrected), uncorrected=known(uncorrected)),
            "row_remap_pending": None if pending is None else bool(pending),
            "row_remap_failed": None if failed is None else bool(failed),
            "retired_pages": {name: len(found) for name, found in pages.items() if found is not None},
        }

    def _nvlink(self, received: float | None, sent: float | None) -> dict[str, Any]:
        if not self._links:
            return {}
        nvml = self._nvml
        states = [self._ask("nvmlDeviceGetNvLinkState", link) for link in self._links]
        return {
            "nvlinks": len(states),
            "nvlinks_active": sum(state == 1 for state in states),
            "nvlink_receive_bytes": self._over_links(received, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX),
            "nvlink_transmit_bytes": self._over_links(sent, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX),
        }

    def _over_links(self, kib: float | None, field: int) -> float | None:
        """Bytes of all links, of which the driver tells KiB; some tell of each link alone."""
        if kib is None:
            each = self._fields([(field, link) for link in self._links])
            kib = None if None in each else sum(each)
        total: float | None = scaled(kib, 1024)
        return total

    def _pcie(self) -> dict[str, Any]:
        return {
            "pcie_generation": known(self._ask("nvmlDeviceGetCurrPcieLinkGeneration")),
            "pcie_lanes": known(self._ask("nvmlDeviceGetCurrPcieLinkWidth")),
            "pcie_replays": known(self._ask_seldom("nvmlDeviceGetPcieReplayCounter")),
        }

    def _fields(self, asked: list[tuple[int, int]]) -> list[Any]:
        """Values of fields by (number, scope), each None where it is not told."""
        return [
            known(getattr(one.value, _VALUES[one.valueType])) if one.nvmlReturn == self._nvml.NVML_SUCCESS else None
            for one in self._ask("nvmlDeviceGetFieldValues", asked) or ()
        ] or [None] * len(asked)

    def _tenants(self) -> dict[str, Any]:
        computing = self._ask("nvmlDeviceGetComputeRunningProcesses")
        drawing = self._ask("nvmlDeviceGetGraphicsRunningProcesses")
        if computing is None and drawing is None:
            return {}
        used = {one.pid: known(one.usedGpuMemory) for one in [*(drawing or ()), *(computing or ())]}
        by_user: Counter[str] = Counter()
        for pid, memory in used.items():
            if memory is not None:
                by_user[self._user_of(pid)] += memory
        return {"processes": len(used), "process_memory_bytes": dict(by_user.most_common(_MOST_USERS))}

    def _mig(self) -> dict[str, Any]:
        current, _ = self._ask_seldom("nvmlDeviceGetMigMode") or (None, None)
        if not current:
            return {"mig": "" if current is None else "off"}
        places = range(self._ask("nvmlDeviceGetMaxMigDeviceCount") or 0)
        parts = [(place, self._ask("nvmlDeviceGetMigDeviceHandleByIndex", place)) for place in places]
        instances = [self._instance(*part) for part in parts if part[1] is not None]
        return {"mig": "on", "instances": tuple(one for one in instances if one.uuid)}

    def _instance(self, number: int, handle: Any) -> Instance:
        whole, self._handle = self._handle, handle
        try:
            memory = self._ask("nvmlDeviceGetMemoryInfo")
            return Instance(
                uuid=self._ask("nvmlDeviceGetUUID") or "",
                name=self._ask("nvmlDeviceGetName") or "",
                number=number,
                memory_used_bytes=known(memory and memory.used),
                memory_total_bytes=known(memory and memory.total),
            )
        finally:
            self._handle = whole


def _given(**values: float | None) -> dict[str, float]:
    return {name: value for name, value in values.items() if value is not None}


def user_of(pid: int) -> str:
    """The name of a process's user; "" where it is not known: NVML gives numbers of the host's, also in a container."""
    try:
        return _user_name(os.stat(f"/proc/{pid}").st_uid) if _has_hosts_numbers() else ""
    except OSError:
        return ""


@cache
def _has_hosts_numbers() -> bool:
    """Whether this process sees the host's processes by their numbers; it is born with that."""
    return os.stat("/proc/self/ns/pid").st_ino == _FIRST_NAMESPACE


@lru_cache(256)
def _user_name(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)
