"""The driver: whether it is there, one of a kind, and fits cards and CUDA."""

import re
from collections.abc import Iterator

from packaging.version import InvalidVersion, Version

from hotloop.doctor.finding import Check, Seen
from hotloop.doctor.record import DeviceFile, MachineRecord
from hotloop.versions.table import Capability, capability_of, current_table

_CONSUMER = re.compile(r"GeForce|TITAN")
_DENIED = ("Permission denied", "Operation not permitted")


def has_driver(record: MachineRecord) -> bool:
    """Whether NVML answers."""
    return bool(record.driver.version)


def unread(record: MachineRecord) -> Iterator[Seen]:
    """A reading that hung or broke off."""
    for name, reason in record.unread.items():
        yield Seen("reading-failed", f"{name}: {reason}")


def no_card(record: MachineRecord) -> Iterator[Seen]:
    """Nothing to train on, as far as bus and NVML could be asked."""
    driver = record.driver
    if (
        record.gpus
        or driver.on_bus != 0
        or driver.module
        or has_driver(record)
        or {"nvml", "devices"} & set(record.unread)
    ):
        return
    if driver.amd:
        yield Seen("amd-gpu", f"{driver.amd} AMD cards on the PCI bus, no NVIDIA card")
    elif not driver.device_files:
        yield Seen("no-gpu", "no NVIDIA card on the PCI bus, and NVML does not answer")


def _cards(record: MachineRecord) -> list[DeviceFile]:
    return [file for file in record.driver.device_files if re.fullmatch(r"/dev/nvidia\d+", file.path)]


def _without_gpus(record: MachineRecord) -> bool:
    """A container on a machine with GPUs that was given none: the module's version may be seen there all the same."""
    there = record.driver.on_bus or record.driver.module
    return bool(there and record.system.container and not has_driver(record) and not _cards(record))


def not_loaded(record: MachineRecord) -> Iterator[Seen]:
    """Cards without a driver."""
    driver = record.driver
    if _without_gpus(record):
        yield Seen("docker-no-gpu-runtime", "this machine has NVIDIA cards, none was given to this container")
    elif not driver.on_bus or driver.module or has_driver(record):
        return
    elif "nouveau" in record.system.modules:
        yield Seen("nouveau-loaded", f"{driver.on_bus} NVIDIA cards on the bus, kernel module nouveau, not nvidia")
    else:
        yield Seen("driver-missing", f"{driver.on_bus} NVIDIA cards on the bus; NVML: {driver.error}")


def two_versions(record: MachineRecord) -> Iterator[Seen]:
    """Library and kernel module of different versions."""
    module, library = record.driver.module, record.driver.version
    if record.driver.error.startswith("Driver/library") or (module and library and module != library):
        yield Seen("nvml-driver-mismatch", f"kernel module {module or '?'}, library {library or 'of another version'}")


def device_files(record: MachineRecord) -> Iterator[Seen]:
    """/dev/nvidia*: there, and open to this process. A scheduler closes the cards of other jobs on purpose."""
    driver, cards = record.driver, _cards(record)
    loaded = driver.module or has_driver(record)
    if not loaded or record.system.virtualization == "wsl" or _without_gpus(record) or "devices" in record.unread:
        return
    files = {file.path: file for file in driver.device_files}
    # The first CUDA program makes nvidia-uvm, through nvidia-modprobe.
    uvm = record.torch is not None and bool(record.torch.cuda) and not record.torch.available
    needed = ["/dev/nvidiactl", *(["/dev/nvidia-uvm"] if uvm else [])]
    missing = [path for path in needed if path not in files] + ([] if cards else ["/dev/nvidia0"])
    if missing:
        yield Seen("device-files-missing", f"the driver's module is loaded, not there: {', '.join(missing)}")
    shared = [files[path] for path in ("/dev/nvidiactl", "/dev/nvidia-uvm") if path in files and not files[path].usable]
    closed = [file for file in shared if file.error in _DENIED]
    if cards and all(file.error in _DENIED for file in cards):
        closed += cards
    if closed:
        told = ", ".join(f"{file.path} ({file.error})" for file in closed)
        yield Seen("permission-denied-device", f"user {record.system.user_id} cannot open {told}")
    for file in [*shared, *cards]:
        if not file.usable and file.error not in _DENIED:
            yield Seen("device-file-failed", f"{file.path}: {file.error}")


def silent(record: MachineRecord) -> Iterator[Seen]:
    """NVML fails for a reason of its own."""
    error = record.driver.error
    told = not record.driver.module or error.startswith("Driver/library")
    if error and not told and all(file.usable for file in record.driver.device_files) and record.driver.device_files:
        yield Seen("nvml-failed", f"NVML: {error}; kernel module {record.driver.module}")


def lost(record: MachineRecord) -> Iterator[Seen]:
    """Cards that do not answer any more."""
    for gpu in record.gpus:
        if gpu.error:
            yield Seen("gpu-lost", f"GPU {gpu.index} {gpu.name or gpu.bus_id}: {gpu.error}", gpu=gpu.index)
    answered, bus = len(record.gpus), record.driver.on_bus
    ours = not (
        record.system.container or record.system.scheduler or any(one.error in _DENIED for one in _cards(record))
    )
    if has_driver(record) and bus and answered < bus and ours:
        yield Seen("gpu-not-seen", f"{bus} NVIDIA cards on the bus, NVML knows {answered}")


def fabric(record: MachineRecord) -> Iterator[Seen]:
    """NVSwitch machines need a service before any CUDA program runs."""
    waiting = [gpu for gpu in record.gpus if gpu.fabric in ("not started", "in progress", "failed")]
    if waiting:
        yield Seen("fabric-manager", f"GPU {waiting[0].index}'s fabric: {waiting[0].fabric}")


def _versions(record: MachineRecord) -> tuple[Version, str] | None:
    torch = record.torch
    if not (torch and torch.cuda and has_driver(record)):
        return None
    try:
        return Version(record.driver.version), torch.cuda
    except InvalidVersion:
        return None


def too_old(record: MachineRecord) -> Iterator[Seen]:
    """Driver against torch's CUDA."""
    known = _versions(record)
    cuda = current_table().cudas.get(known[1]) if known else None
    if known is None or cuda is None or "compat" in record.driver.libcuda:
        return
    if known[0] < Version(cuda.least_driver):
        evidence = f"driver {known[0]}; CUDA {cuda.version} of torch {record.torch and record.torch.version}"
        yield Seen("cuda-driver-too-old", f"{evidence} needs {cuda.least_driver}", "hotloop resolve")
    elif known[0] < Version(cuda.paired_driver):
        yield Seen("driver-limited", f"driver {known[0]}; CUDA {cuda.version} came with {cuda.paired_driver}")


def branches(record: MachineRecord) -> Iterator[Seen]:
    """Cards that a driver does not know yet, or does not know any more."""
    table, known = current_table(), record.driver.version.split(".")[0]
    for gpu in record.gpus if known.isdigit() else ():
        architecture = table.architecture(_capability(gpu.capability)) if gpu.capability else None
        if architecture and not architecture.first_branch <= int(known) <= (architecture.last_branch or 10_000):
            limits = f"from {architecture.first_branch}" + (
                f" to {architecture.last_branch}" if architecture.last_branch else ""
            )
            yield Seen("card-driver-branch", f"{gpu.name}: drivers {limits}; this one is {record.driver.version}")


def _capability(text: str) -> Capability:
    return capability_of(text)


def forward(record: MachineRecord) -> Iterator[Seen]:
    """Packages of forward compatibility: for cards of data centres, and newer than the driver."""
    driver = record.driver
    if "compat" not in driver.libcuda or (record.torch and record.torch.available):
        return
    consumer = [gpu.name for gpu in record.gpus if _CONSUMER.search(gpu.name)]
    if consumer:
        yield Seen("cuda-forward-compat", f"libcuda is {driver.libcuda}; {consumer[0]} does not allow it (error 804)")
    found = re.search(r"\.so\.(\d+\.\d+[\d.]*)$", driver.libcuda)
    if found and driver.module and Version(found[1]) < Version(driver.module):
        yield Seen("cuda-forward-compat", f"libcuda is {driver.libcuda}, older than the driver {driver.module} (803)")


def capabilities(record: MachineRecord) -> Iterator[Seen]:
    """What the container runtime hands in."""
    given = record.environment.get("NVIDIA_DRIVER_CAPABILITIES")
    if not given or not record.system.container or (has_driver(record) and record.driver.libcuda):
        return
    words = set(given.replace(" ", "").split(","))
    missing = {"compute", "utility"} - words
    if missing and "all" not in words:
        yield Seen(
            "container-capabilities", f"NVIDIA_DRIVER_CAPABILITIES={given}: without {', '.join(sorted(missing))}"
        )


CHECKS: tuple[Check, ...] = (
    unread, no_card, not_loaded, two_versions, device_files, silent, lost, fabric, too_old, branches, forward,
    capabilities,
)  # fmt: skip
