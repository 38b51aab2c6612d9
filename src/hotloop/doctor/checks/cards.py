"""The cards themselves: memory errors, clocks, modes, and who else is on them."""

from collections.abc import Iterator

from hotloop.core.units import format_bytes
from hotloop.doctor.finding import Check, Seen
from hotloop.doctor.record import Gpu, MachineRecord

_APPLICATION_XIDS = {13, 31, 43, 45, 68, 69}
"""That a program causes, as a rule: a kernel's error, its page fault, its end."""
_HARMLESS_XIDS = {63, 92, 94}
"""A row remapped, a high rate of single-bit errors, an error contained: the card goes on, and is to be watched."""
RECOVERY_XID = 154
"""The driver's advice, which may be to do nothing."""
_BUSY_SHARE = 0.02
_HELD_BYTES = 2 << 30
_HOT_BELOW = 5


def _name(gpu: Gpu) -> str:
    return f"GPU {gpu.index} {gpu.name}"


def memory_errors(record: MachineRecord) -> Iterator[Seen]:
    """ECC, retired pages, remapped rows."""
    for gpu in record.gpus:
        if gpu.ecc_uncorrected:
            yield Seen(
                "gpu-ecc",
                f"{_name(gpu)}: {gpu.ecc_uncorrected} uncorrected errors since the driver was loaded",
                gpu=gpu.index,
            )
        if gpu.rows_failed:
            yield Seen("row-remap-failed", f"{_name(gpu)}: a row could not be remapped", gpu=gpu.index)
        if gpu.rows_pending:
            yield Seen("row-remap-pending", f"{_name(gpu)}: rows wait to be remapped", gpu=gpu.index)
        if gpu.retired_pages_pending:
            yield Seen("retired-pages-pending", f"{_name(gpu)}: pages wait to be retired", gpu=gpu.index)
        if gpu.ecc is False and gpu.ecc_pending is not None and gpu.memory_bytes > 30 << 30:
            yield Seen("ecc-off", f"{_name(gpu)}: ECC is off", gpu=gpu.index)
        if gpu.recovery_action:
            yield Seen("recovery-needed", f"{_name(gpu)}: the driver asks to {gpu.recovery_action}", gpu=gpu.index)


def xids(record: MachineRecord) -> Iterator[Seen]:
    """Errors in the kernel's log, each number once."""
    if record.kernel_log is False and record.driver.module and not record.system.container:
        yield Seen("kernel-log-closed", "dmesg and /var/log/kern.log are closed to this user")
    by_number = {xid.number: xid for xid in record.xids}
    for number, xid in by_number.items():
        times = sum(other.number == number for other in record.xids)
        evidence = f"Xid {number}, {times} times, last: {xid.line}"
        if number == RECOVERY_XID and "(None)" in xid.line:
            continue  # it tells that nothing is to be done
        yield Seen(finding_of_xid(number), evidence)


def finding_of_xid(number: int) -> str:
    """By which the catalogue knows what it is and what to do."""
    if number in _APPLICATION_XIDS:
        return "xid-application"
    return "xid-contained" if number in _HARMLESS_XIDS else "xid"


def clocks(record: MachineRecord) -> Iterator[Seen]:
    """What keeps a card below its speed."""
    for gpu in record.gpus:
        reasons = set(gpu.throttle)
        if reasons & {"thermal_hardware", "thermal_software"}:
            heat = f"{gpu.temperature_c} °C" if gpu.temperature_c is not None else "too hot"
            yield Seen(
                "thermal-throttle",
                f"{_name(gpu)}: {heat}, {gpu.clock_sm_mhz} of {gpu.clock_sm_max_mhz} MHz",
                gpu=gpu.index,
            )
        elif _is_hot(gpu):
            near = f"{gpu.temperature_c} °C, slows down at {gpu.temperature_slowdown_c} °C"
            yield Seen("gpu-hot", f"{_name(gpu)}: {near}", gpu=gpu.index)
        if "power_brake" in reasons:
            yield Seen("power-brake", f"{_name(gpu)}: {gpu.clock_sm_mhz} of {gpu.clock_sm_max_mhz} MHz", gpu=gpu.index)
        elif "hardware_slowdown" in reasons and not reasons & {"thermal_hardware"}:
            yield Seen(
                "hardware-slowdown", f"{_name(gpu)}: {gpu.clock_sm_mhz} of {gpu.clock_sm_max_mhz} MHz", gpu=gpu.index
            )
        limit, default = gpu.power_limit_watts, gpu.power_default_watts
        if limit and default and limit < 0.95 * default:
            fix = f"sudo nvidia-smi -i N -pl {default:.0f}"
            evidence = f"{_name(gpu)}: limit {limit:.0f} W, by default {default:.0f} W"
            yield Seen("power-limit-low", evidence, fix, gpu.index)
        set_, usual = gpu.clock_application_mhz, gpu.clock_application_default_mhz
        if set_ and usual and set_ < 0.95 * usual:
            yield Seen(
                "clocks-limited", f"{_name(gpu)}: application clock {set_} MHz, by default {usual} MHz", gpu=gpu.index
            )


def _is_hot(gpu: Gpu) -> bool:
    slows_at = gpu.temperature_slowdown_c or 0
    return gpu.temperature_c is not None and 0 < slows_at <= gpu.temperature_c + _HOT_BELOW


def modes(record: MachineRecord) -> Iterator[Seen]:
    """Settings of the card."""
    for gpu in record.gpus:
        if gpu.compute_mode == "prohibited":
            yield Seen("compute-mode-prohibited", f"{_name(gpu)}: compute mode prohibited", gpu=gpu.index)
        elif gpu.compute_mode == "exclusive_process":
            yield Seen("compute-mode-exclusive", f"{_name(gpu)}: one process at a time", gpu=gpu.index)
        if gpu.mig and not gpu.mig_instances:
            yield Seen("mig-empty", f"{_name(gpu)}: MIG is on, no instance is made", gpu=gpu.index)
        if gpu.mig is not None and gpu.mig_pending is not None and gpu.mig != gpu.mig_pending:
            state = "on" if gpu.mig_pending else "off"
            yield Seen("mig-pending", f"{_name(gpu)}: MIG is to be {state} after a reset", gpu=gpu.index)
        if gpu.mig and gpu.mig_instances > 1:
            yield Seen("mig-several", f"{_name(gpu)}: {gpu.mig_instances} instances", gpu=gpu.index)
        if gpu.persistence is False and not record.system.container and record.system.virtualization != "wsl":
            yield Seen("persistence-off", f"{_name(gpu)}: persistence mode is off", gpu=gpu.index)
        if gpu.virtualization == "vgpu":
            yield Seen("vgpu", f"{_name(gpu)} is a part that a hypervisor gives", gpu=gpu.index)


def tenants(record: MachineRecord) -> Iterator[Seen]:
    """Who has the card's memory."""
    for gpu in record.gpus:
        if not gpu.memory_bytes or gpu.mig:
            continue
        share = gpu.memory_used_bytes / gpu.memory_bytes
        computing = [one for one in gpu.tenants if not one.graphics]
        elsewhere = record.system.container or record.system.virtualization == "wsl" or gpu.virtualization == "vgpu"
        used = f"{format_bytes(gpu.memory_used_bytes)} of {format_bytes(gpu.memory_bytes)} in use"
        if computing and share > _BUSY_SHARE:
            who = ", ".join(f"{one.name or 'process'} {one.pid}" for one in computing[:4])
            yield Seen("gpu-in-use", f"{_name(gpu)}: {used}, by {who}", gpu=gpu.index)
        elif not gpu.tenants and gpu.memory_used_bytes > _HELD_BYTES and not elsewhere:
            yield Seen("gpu-memory-held", f"{_name(gpu)}: {used}, by no process that is seen", gpu=gpu.index)


def mixed(record: MachineRecord) -> Iterator[Seen]:
    """Cards of several kinds in one machine."""
    names = sorted({gpu.name for gpu in record.gpus if gpu.name})
    if len(names) > 1:
        yield Seen("mixed-cards", ", ".join(names))
        chosen = record.environment.get("CUDA_VISIBLE_DEVICES", "")
        numbers = chosen and all(part.strip().isdigit() for part in chosen.split(","))
        if numbers and record.environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
            yield Seen("device-order", f"CUDA_VISIBLE_DEVICES={chosen} with {', '.join(names)}")


CHECKS: tuple[Check, ...] = (memory_errors, xids, clocks, modes, tenants, mixed)
