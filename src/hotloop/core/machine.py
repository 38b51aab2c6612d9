"""The machine as plain data: what training may use of it, not only what is built in."""

import os
import platform
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

_PACKAGES = (
    "torch", "torchvision", "timm", "numpy", "pillow", "simplejpeg", "cykooz-resizer", "nvidia-nvimgcodec-cu13",
    "triton",
)  # fmt: skip


@dataclass(frozen=True)
class Gpu:
    """One card, as NVML names it (`nvidia-smi --query-gpu=name,uuid,memory.total,compute_cap`)."""

    name: str
    uuid: str
    memory_bytes: int
    capability: str = ""


@dataclass(frozen=True)
class Machine:
    """What a run was given.

    Attributes:
        cpus: processors this process may use: affinity and cgroup quota counted, at least 1.
        memory_bytes: memory this process may use: the cgroup limit or the installed memory, whichever is smaller.
        driver: version of the NVIDIA driver, empty without one.
        packages: version of each installed package that training depends on.
    """

    hostname: str
    system: str
    python: str
    cpus: int
    memory_bytes: int
    driver: str
    gpus: tuple[Gpu, ...]
    packages: dict[str, str]


def read_machine(root: Path = Path("/")) -> Machine:
    """Read this machine; `root` stands for the file system's root, so that a recorded one can be read as well."""
    driver, gpus = _read_gpus()
    return Machine(
        hostname=platform.node(),
        system=platform.platform(),
        python=sys.version.split()[0],
        cpus=usable_cpus(root),
        memory_bytes=usable_memory_bytes(root),
        driver=driver,
        gpus=gpus,
        packages=_installed(_PACKAGES),
    )


def usable_cpus(root: Path = Path("/")) -> int:
    """Processors this process may use: a container's quota counts, not only the cores that are visible."""
    return max(1, int(cpu_quota(root)))


def cpu_quota(root: Path = Path("/")) -> float:
    """The same with parts of processors."""
    cpus = float(len(os.sched_getaffinity(0)))
    for group in _cgroups(root):
        quota, _, period = _read(group / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit():
            cpus = min(cpus, int(quota) / int(period))
        quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit():
            cpus = min(cpus, int(quota) / int(period))
    return cpus


def usable_memory_bytes(root: Path = Path("/")) -> int:
    """Memory this process may use, the cgroup's limit counted; 0 where it cannot be read."""
    lines = dict(line.split(":", 1) for line in _read(root / "proc/meminfo").splitlines() if ":" in line)
    limits = [int(lines["MemTotal"].split()[0]) * 1024] if "MemTotal" in lines else []
    for group in _cgroups(root):
        texts = (_read(group / "memory.max"), _read(group / "memory.limit_in_bytes"))
        limits += [int(text) for text in texts if text.isdigit()]
    return min(limits, default=0)


def _cgroups(root: Path) -> Iterable[Path]:
    """Folders of this process's control groups and all that contain them (v2, and v1's cpu and memory)."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            if controller in ("", "cpu", "memory"):
                mount = root / "sys/fs/cgroup" / controller
                group = mount / path.lstrip("/")
                yield group
                yield from (parent for parent in group.parents if parent.is_relative_to(mount))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _installed(names: Iterable[str]) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _read_gpus() -> tuple[str, tuple[Gpu, ...]]:
    import pynvml as nvml

    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return "", ()
    try:
        gpus = []
        for number in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(number)
            memory_bytes = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
            major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
            name, uuid = nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetUUID(handle)
            gpus.append(Gpu(name, uuid, memory_bytes, f"{major}.{minor}"))
        return str(nvml.nvmlSystemGetDriverVersion()), tuple(gpus)
    finally:
        nvml.nvmlShutdown()
