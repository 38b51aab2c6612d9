"""The driver and the cards, as NVML tells them. Each reading may be missing: WSL, MIG and vGPU leave many out."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml as nvml

from hotloop.doctor.readers.text import text

_THROTTLE = {
    0x1: "idle", 0x2: "application_clocks", 0x4: "power_cap", 0x8: "hardware_slowdown", 0x20: "thermal_software",
    0x40: "thermal_hardware", 0x80: "power_brake",
}  # fmt: skip
"""nvmlClocksEventReasons, the former nvmlClocksThrottleReasons."""
_COMPUTE = {0: "default", 2: "prohibited", 3: "exclusive_process"}
_COMPLETED = 3
_FABRIC = {0: "not supported", 1: "not started", 2: "in progress", 3: "completed"}
_PATHS = {0: "internal", 10: "pix", 20: "pxb", 30: "phb", 40: "node", 50: "sys"}
_PEER = {0: "ok", 1: "chipset not supported", 2: "not supported by the GPU", 3: "topology not supported",
         4: "disabled by a registry key", 5: "not supported", 6: "unknown"}  # fmt: skip
_RECOVERY = {
    1: "reset the GPU",
    2: "reboot the machine",
    3: "drain its peers",
    4: "drain, then reset the GPU",
    5: "recover the IMEX domain",
    6: "reset the bus",
    7: "reboot the machine",
}
"""nvmlDeviceGpuRecoveryAction_t."""
_PEER_READ = 0  # pynvml 13 has a tuple under NVML_P2P_CAPS_INDEX_READ


def read() -> dict[str, Any]:
    """`driver` (version, cuda, error), `gpus` and `pairs`."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return {"driver": {"error": _words(error)}, "gpus": [], "pairs": []}
    except OSError as error:  # the library is there and cannot be loaded
        return {"driver": {"error": str(error)}, "gpus": [], "pairs": []}
    cuda = _or(lambda: nvml.nvmlSystemGetCudaDriverVersion_v2())
    driver = {
        "version": _or(lambda: nvml.nvmlSystemGetDriverVersion()) or "",
        "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else "",
    }
    gpus, handles = [], []
    for index in range(_or(lambda: nvml.nvmlDeviceGetCount()) or 0):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
        except nvml.NVMLError as error:
            gpus.append({"index": index, "name": "", "error": _words(error)})
            continue
        handles.append((index, handle))
        gpus.append({"index": index, **_gpu(handle)})
    pairs = [
        {"first": one, "second": other, **_pair(handle, second)}
        for place, (one, handle) in enumerate(handles)
        for other, second in handles[place + 1 :]
    ]
    return {"driver": driver, "gpus": gpus, "pairs": pairs}


def _words(error: nvml.NVMLError) -> str:
    return str(error)


def _or(call: Callable[[], Any]) -> Any:
    """What a call gives; None where this card, driver or system does not tell."""
    try:
        return call()
    except (nvml.NVMLError, AttributeError, OSError):
        return None


def _gpu(handle: Any) -> dict[str, Any]:
    name = _or(lambda: nvml.nvmlDeviceGetName(handle))
    error = ""
    memory = None
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError as failed:
        if failed.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_UNKNOWN, nvml.NVML_ERROR_RESET_REQUIRED):
            error = _words(failed)
    capability = _or(lambda: nvml.nvmlDeviceGetCudaComputeCapability(handle))
    mode = _or(lambda: nvml.nvmlDeviceGetVirtualizationMode(handle))
    bus = _or(lambda: nvml.nvmlDeviceGetPciInfo(handle).busId)
    return {
        "name": name or "",
        "uuid": _or(lambda: nvml.nvmlDeviceGetUUID(handle)) or "",
        "bus_id": bus or "",
        "error": error,
        "capability": f"{capability[0]}.{capability[1]}" if capability else "",
        "memory_bytes": memory.total if memory else 0,
        "memory_used_bytes": memory.used if memory else 0,
        "virtualization": {1: "passthrough", 2: "vgpu", 3: "host vgpu", 4: "host vsga"}.get(mode, ""),
        "utilization": _share(_or(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)),
        "tenants": _tenants(handle),
        "recovery_action": _recovery(handle),
        "fabric": _fabric(handle),
        **_health(handle),
        **_clocks(handle),
        **_modes(handle),
        **_links(handle),
        **_place(bus or ""),
    }


def _share(percent: int | None) -> float | None:
    return None if percent is None else percent / 100


def _health(handle: Any) -> dict[str, Any]:
    modes = _or(lambda: nvml.nvmlDeviceGetEccMode(handle)) or (None, None)
    rows = _or(lambda: nvml.nvmlDeviceGetRemappedRows(handle)) or (None, None, None, None)
    pending = _or(lambda: nvml.nvmlDeviceGetRetiredPagesPendingStatus(handle))

    def errors(counter: int) -> int | None:
        found: int | None = _or(
            lambda: nvml.nvmlDeviceGetTotalEccErrors(handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, counter)
        )
        return found

    return {
        "ecc": None if modes[0] is None else bool(modes[0]),
        "ecc_pending": None if modes[1] is None else bool(modes[1]),
        "ecc_uncorrected": errors(nvml.NVML_VOLATILE_ECC),
        "ecc_uncorrected_ever": errors(nvml.NVML_AGGREGATE_ECC),
        "retired_pages_pending": None if pending is None else bool(pending),
        "rows_remapped": None if rows[0] is None else rows[0] + rows[1],
        "rows_pending": None if rows[2] is None else bool(rows[2]),
        "rows_failed": None if rows[3] is None else bool(rows[3]),
    }


def _clocks(handle: Any) -> dict[str, Any]:
    sm = nvml.NVML_CLOCK_SM
    reasons = _or(lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    if reasons is None:  # the name before driver 535
        reasons = _or(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
    watts = {
        "power_watts": _or(lambda: nvml.nvmlDeviceGetPowerUsage(handle)),
        "power_limit_watts": _or(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle)),
        "power_default_watts": _or(lambda: nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle)),
    }
    slowdown = nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
    return {
        "clock_sm_mhz": _or(lambda: nvml.nvmlDeviceGetClockInfo(handle, sm)),
        "clock_sm_max_mhz": _or(lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, sm)),
        "clock_application_mhz": _or(lambda: nvml.nvmlDeviceGetApplicationsClock(handle, sm)),
        "clock_application_default_mhz": _or(lambda: nvml.nvmlDeviceGetDefaultApplicationsClock(handle, sm)),
        "throttle": [name for bit, name in _THROTTLE.items() if (reasons or 0) & bit],
        "temperature_c": _or(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        "temperature_slowdown_c": _or(lambda: nvml.nvmlDeviceGetTemperatureThreshold(handle, slowdown)),
        **{name: None if value is None else value / 1000 for name, value in watts.items()},
    }


def _modes(handle: Any) -> dict[str, Any]:
    mig = _or(lambda: nvml.nvmlDeviceGetMigMode(handle)) or (None, None)
    persistence = _or(lambda: nvml.nvmlDeviceGetPersistenceMode(handle))
    instances = 0
    if mig[0]:
        for place in range(_or(lambda: nvml.nvmlDeviceGetMaxMigDeviceCount(handle)) or 0):
            instances += _or(lambda place=place: nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place)) is not None  # type: ignore[misc]
    return {
        "persistence": None if persistence is None else bool(persistence),
        "compute_mode": _COMPUTE.get(_or(lambda: nvml.nvmlDeviceGetComputeMode(handle)) or 0, "default"),
        "mig": None if mig[0] is None else bool(mig[0]),
        "mig_pending": None if mig[1] is None else bool(mig[1]),
        "mig_instances": instances,
    }


def _links(handle: Any) -> dict[str, Any]:
    states = [
        state
        for link in range(nvml.NVML_NVLINK_MAX_LINKS)
        if (state := _or(lambda link=link: nvml.nvmlDeviceGetNvLinkState(handle, link))) is not None  # type: ignore[misc]
    ]
    return {
        "pcie_generation": _or(lambda: nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle)),
        "pcie_generation_max": _or(lambda: nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)),
        "pcie_generation_device": _or(lambda: nvml.nvmlDeviceGetGpuMaxPcieLinkGeneration(handle)),
        "pcie_width": _or(lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(handle)),
        "pcie_width_max": _or(lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)),
        "pcie_replays": _or(lambda: nvml.nvmlDeviceGetPcieReplayCounter(handle)),
        "nvlinks": len(states),
        "nvlinks_active": sum(states),
    }


def _place(bus_id: str) -> dict[str, Any]:
    """Where on the machine: /sys knows the card by a shorter name."""
    from hotloop.doctor.readers.text import number, number_list

    device = Path("/sys/bus/pci/devices") / bus_id.lower()[-12:]
    node = number(device / "numa_node")
    return {
        "numa_node": node if node is not None and node >= 0 else None,
        "processors": number_list(text(device / "local_cpulist")),
    }


def _tenants(handle: Any) -> list[dict[str, Any]]:
    computing = _or(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle)) or ()
    drawing = _or(lambda: nvml.nvmlDeviceGetGraphicsRunningProcesses(handle)) or ()
    found = {process.pid: (process.usedGpuMemory, True) for process in drawing}
    found |= {process.pid: (process.usedGpuMemory, False) for process in computing}
    return [
        {"pid": pid, "name": _process_name(pid), "memory_bytes": used, "graphics": graphics}
        for pid, (used, graphics) in sorted(found.items())
    ]


def _process_name(pid: int) -> str:
    with contextlib.suppress(nvml.NVMLError):
        return Path(str(nvml.nvmlSystemGetProcessName(pid)).split(" ")[0]).name
    return text(f"/proc/{pid}/comm")


def _recovery(handle: Any) -> str:
    action = getattr(nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
    if action is None:
        return ""
    values = _or(lambda: nvml.nvmlDeviceGetFieldValues(handle, [action]))
    if not values or values[0].nvmlReturn != nvml.NVML_SUCCESS:
        return ""
    return _RECOVERY.get(values[0].value.uiVal, "")


def _fabric(handle: Any) -> str:
    found = nvml.c_nvmlGpuFabricInfo_t() if hasattr(nvml, "c_nvmlGpuFabricInfo_t") else None
    if found is None or _or(lambda: nvml.nvmlDeviceGetGpuFabricInfo(handle, nvml.byref(found)) or True) is None:
        return ""
    return "failed" if found.state == _COMPLETED and found.status else _FABRIC.get(found.state, "")


def _pair(one: Any, other: Any) -> dict[str, Any]:
    straight = sum(
        _same(_or(lambda link=link: nvml.nvmlDeviceGetNvLinkRemotePciInfo(one, link).busId), other)  # type: ignore[misc]
        for link in range(nvml.NVML_NVLINK_MAX_LINKS)
    )
    by_nvlink = _or(lambda: nvml.nvmlDeviceGetP2PStatus(one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)) == 0
    level = _or(lambda: nvml.nvmlDeviceGetTopologyCommonAncestor(one, other))
    peer = _or(lambda: nvml.nvmlDeviceGetP2PStatus(one, other, _PEER_READ))
    path = "nvlink" if straight or by_nvlink else _PATHS.get(level, "")
    return {"path": path, "peer_read": "" if peer is None else _PEER.get(peer, "unknown"), "nvlinks": straight}


def _same(bus_id: str | None, handle: Any) -> bool:
    own = _or(lambda: nvml.nvmlDeviceGetPciInfo(handle).busId)
    return bool(bus_id and own and bus_id.lower()[-12:] == own.lower()[-12:])
