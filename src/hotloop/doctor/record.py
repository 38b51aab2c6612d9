"""All that the doctor reads of a machine, as plain data: of this one, or of a file that another one saved.

What could not be read is None, or an empty tuple; `unread` says which reader failed and why.
"""

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from hotloop.core.errors import InputError

FORMAT = 1
"""Of the file. A reader of another one says so."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class System(_Part):
    """The operating system and what it runs in.

    Attributes:
        container: "docker", "kubernetes", "podman", "apptainer" or ""; "container" where it is one of another kind.
        virtualization: "wsl", "kvm" and the like; "" on bare metal.
        scheduler: "slurm" within one of its jobs.
        clock_synchronised: by NTP or the host.
        time: UTC, ISO 8601.
        effective_capabilities: of this process, as the kernel's mask.
    """

    hostname: str = ""
    hostname_resolves: bool | None = None
    kernel: str = ""
    os: str = ""
    processor: str = "x86_64"
    glibc: str = ""
    container: str = ""
    virtualization: str = ""
    scheduler: str = ""
    user_id: int = 1000
    effective_capabilities: int = 0
    time: str = ""
    time_zone: str = ""
    clock_synchronised: bool | None = None
    encoding: str = "utf-8"
    python: str = ""
    python_path: str = ""
    python_headers: bool | None = None
    c_compiler: str = ""
    nvcc: str = ""
    """Version of the CUDA toolkit's compiler; "" without one."""
    kernel_command_line: str = ""
    """What of it is about the IOMMU."""
    modules: tuple[str, ...] = ()
    """Kernel modules that bear on GPUs and RDMA: nvidia, nvidia_uvm, nvidia_peermem, nouveau, ib_core, amdgpu."""


class Processors(_Part):
    """CPUs.

    Attributes:
        visible: that tools count (`nproc`, os.cpu_count).
        usable: with the control group's quota, as it stands: 2.5.
        governor: frequency scaling; "" where it is not told.
    """

    model: str = ""
    visible: int = 1
    usable: float = 1.0
    numa_nodes: int = 1
    governor: str = ""
    allowed: tuple[int, ...] = ()


class Memory(_Part):
    """Host memory.

    Attributes:
        limit_bytes: the control group's; None without one.
        oom_kills: processes of this control group that the kernel killed.
    """

    total_bytes: int = 0
    available_bytes: int = 0
    limit_bytes: int | None = None
    oom_kills: int | None = None


class Limits(_Part):
    """What this process may take; None is unlimited, or not told."""

    shm_bytes: int | None = None
    shm_free_bytes: int | None = None
    memlock_bytes: int | None = None
    open_files: int | None = None
    open_files_hard: int | None = None
    processes: int | None = None
    pids: int | None = None


class DeviceFile(_Part):
    """One of /dev/nvidia*."""

    path: str
    usable: bool
    error: str = ""


class Driver(_Part):
    """NVIDIA's driver.

    Attributes:
        version: of the libraries, by NVML.
        module: of the kernel module that is loaded, /proc/driver/nvidia/version.
        cuda: the newest CUDA that it knows.
        error: NVML's, if it did not start.
        libcuda: path of the library that processes load.
        on_bus: NVIDIA cards that the PCI bus shows; None where it cannot be seen.
        amd: AMD cards on the bus.
    """

    version: str = ""
    module: str = ""
    cuda: str = ""
    error: str = ""
    libcuda: str = ""
    device_files: tuple[DeviceFile, ...] = ()
    on_bus: int | None = None
    acs: int | None = None
    """PCI bridges that send copies between cards through the root (access control services); None if not readable."""
    amd: int = 0


class Tenant(_Part):
    """A process on a GPU. NVML gives numbers of the host's, so in a container it may not be found."""

    pid: int
    name: str = ""
    memory_bytes: int | None = None
    graphics: bool = False
    """It draws, and does not compute."""


class Gpu(_Part):
    """One card, or a part of one."""

    index: int
    name: str
    uuid: str = ""
    bus_id: str = ""
    capability: str = ""
    memory_bytes: int = 0
    memory_used_bytes: int = 0
    error: str = ""
    """NVML's, where the card does not answer."""
    virtualization: str = ""
    """"vgpu" for a part that a hypervisor gives; "passthrough"; "" on bare metal."""
    ecc: bool | None = None
    ecc_pending: bool | None = None
    ecc_uncorrected: int | None = None
    """Since the driver was loaded."""
    ecc_uncorrected_ever: int | None = None
    retired_pages_pending: bool | None = None
    rows_remapped: int | None = None
    rows_pending: bool | None = None
    rows_failed: bool | None = None
    recovery_action: str = ""
    clock_sm_mhz: int | None = None
    clock_sm_max_mhz: int | None = None
    clock_application_mhz: int | None = None
    clock_application_default_mhz: int | None = None
    throttle: tuple[str, ...] = ()
    """Of thermal_hardware, thermal_software, power_brake, hardware_slowdown, power_cap, application_clocks, idle."""
    temperature_c: int | None = None
    temperature_slowdown_c: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    power_default_watts: float | None = None
    persistence: bool | None = None
    compute_mode: str = "default"
    mig: bool | None = None
    mig_pending: bool | None = None
    mig_instances: int = 0
    utilization: float | None = None
    tenants: tuple[Tenant, ...] = ()
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_generation_device: int | None = None
    """That the card could, where `pcie_generation_max` is what card and slot can together."""
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    pcie_replays: int | None = None
    nvlinks: int = 0
    nvlinks_active: int = 0
    numa_node: int | None = None
    processors: tuple[int, ...] = ()
    """Near the card."""
    fabric: str = ""
    """"completed", "in progress", "not started", "failed" or "not supported"."""


class Pair(_Part):
    """How two cards see each other.

    Attributes:
        path: "nvlink", "pix", "pxb", "phb", "node" or "sys".
        peer_read: whether they may read each other's memory: "ok", or NVML's reason.
        nvlinks: that lead from one to the other without a switch.
    """

    first: int
    second: int
    path: str
    peer_read: str = "ok"
    nvlinks: int = 0


class Xid(_Part):
    """An error of a card in the kernel's log."""

    number: int
    bus_id: str
    line: str


class Library(_Part):
    """A shared library that Python's torch loads.

    Attributes:
        expected: the folder of the wheel that brings it; "" where none does.
        why: what made the loader take another one: a variable with its value, "ldconfig", or "".
    """

    name: str
    path: str
    version: str = ""
    expected: str = ""
    expected_version: str = ""
    why: str = ""


class Torch(_Part):
    """torch in this Python, asked by a process of its own.

    Attributes:
        cuda: it was built for; "" for a build without.
        architectures: it holds kernels for: "sm_90", "compute_120".
        error: of its import, the last line.
        cuda_error: why it sees no GPU, in its own words.
    """

    version: str = ""
    cuda: str = ""
    cudnn: str = ""
    nccl: str = ""
    architectures: tuple[str, ...] = ()
    available: bool = False
    devices: tuple[str, ...] = ()
    multiprocessors: tuple[int, ...] = ()
    """Of each device."""
    error: str = ""
    cuda_error: str = ""
    import_seconds: float = 0.0
    libraries: tuple[Library, ...] = ()


class TensorFlow(_Part):
    """TensorFlow by its own record of the build.

    Attributes:
        missing: libraries of CUDA that it needs and that are not found.
    """

    version: str = ""
    cuda: str = ""
    cudnn: str = ""
    missing: tuple[str, ...] = ()


class Pin(_Part):
    """A package that torch asks for by its exact version."""

    package: str
    asked: str
    installed: str


class Folder(_Part):
    """A place for data.

    Attributes:
        kind: "nvme", "ssd", "hdd", "network", "memory", "overlay" or "".
        read_bytes_per_second: measured with what lies there, beside the page cache; None if it was not asked for.
    """

    path: str
    role: str = "data"
    kind: str = ""
    device: int = 0
    """Its number, the same for folders on one file system."""
    file_system: str = ""
    total_bytes: int = 0
    free_bytes: int = 0
    free_files: int | None = None
    total_files: int | None = None
    writable: bool = True
    read_bytes_per_second: float | None = None
    error: str = ""


class Interface(_Part):
    """Of the network."""

    name: str
    up: bool
    speed_mbit: int | None = None


class Rdma(_Part):
    """An InfiniBand or RoCE port."""

    name: str
    state: str
    rate: str = ""
    kind: str = ""


class Listener(_Part):
    """A socket that answers beyond this machine."""

    port: int
    address: str
    process: str = ""


class Security(_Part):
    """What attackers look for first."""

    ssh_password: bool | None = None
    ssh_root: str = ""
    listeners: tuple[Listener, ...] = ()
    readable_keys: tuple[str, ...] = ()
    container_socket: str = ""


class Rate(_Part):
    """What a probe measured.

    Attributes:
        expected: what this card or link should reach; None where nobody has said.
        source: of the expectation, or why there is none.
        said: the library's own words where they matter.
    """

    name: str
    gpu: int | None = None
    value: float | None = None
    unit: str = ""
    expected: float | None = None
    source: str = ""
    said: str = ""
    error: str = ""
    seconds: float = 0.0


class MachineRecord(_Part):
    """A machine."""

    format: int = FORMAT
    hotloop: str = ""
    date: str = ""
    system: System = System()
    processors: Processors = Processors()
    memory: Memory = Memory()
    limits: Limits = Limits()
    driver: Driver = Driver()
    gpus: tuple[Gpu, ...] = ()
    pairs: tuple[Pair, ...] = ()
    xids: tuple[Xid, ...] = ()
    kernel_log: bool | None = None
    """Whether it could be read."""
    torch: Torch | None = None
    tensorflow: TensorFlow | None = None
    packages: dict[str, str] = {}
    pins: tuple[Pin, ...] = ()
    folders: tuple[Folder, ...] = ()
    interfaces: tuple[Interface, ...] = ()
    rdma: tuple[Rdma, ...] = ()
    environment: dict[str, str] = {}
    security: Security = Security()
    rates: tuple[Rate, ...] = ()
    unread: dict[str, str] = {}


def load_record(path: Path) -> MachineRecord:
    """A record that `hotloop doctor --save` wrote.

    Raises:
        InputError: the file cannot be read, is no record, or is of another version.
    """
    fix = "hotloop doctor --save machine.json writes one"
    try:
        raw: Any = json.loads(path.read_text())
    except OSError as error:
        raise InputError(f"cannot read {path}", error.strerror or str(error), fix) from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is no record of a machine", f"not JSON: {error}", fix) from None
    if not isinstance(raw, dict) or "format" not in raw:
        raise InputError(f"{path} is no record of a machine", "it has no format", fix)
    if raw["format"] != FORMAT:
        cause = f"this hotloop reads format {FORMAT}"
        raise InputError(f"{path} has format {raw['format']!r}", cause, "save it with this version of hotloop")
    try:
        return MachineRecord.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InputError(f"{path} is no record of a machine", f"{where}: {first['msg']}", fix) from None
