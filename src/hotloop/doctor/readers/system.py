"""The operating system, processors, memory and limits, from /proc, /sys and the control group."""

import locale
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hotloop.core.machine import usable_memory_bytes
from hotloop.doctor.readers.text import number, text

_MODULES = ("nvidia", "nvidia_uvm", "nvidia_peermem", "nouveau", "ib_core", "amdgpu", "gdrdrv")
_LOOKUP_SECONDS = 1.0


def read() -> dict[str, Any]:
    """`system`, `processors`, `memory`, `limits` and parts of `driver`."""
    return {
        "system": {**_system(), **_python(), **_clock()},
        "processors": _processors(),
        "memory": _memory(),
        "limits": _limits(),
        "driver": _driver(),
    }


def _system() -> dict[str, Any]:
    release = dict(line.split("=", 1) for line in text("/etc/os-release").splitlines() if "=" in line)
    status = dict(line.split(":\t", 1) for line in text("/proc/self/status").splitlines() if ":\t" in line)
    loaded = {line.split()[0] for line in text("/proc/modules").splitlines() if line}
    built_in = {name for name in _MODULES if Path("/sys/module", name).exists()}
    return {
        "hostname": platform.node(),
        "hostname_resolves": _resolves(platform.node()),
        "kernel": platform.release(),
        "os": release.get("PRETTY_NAME", platform.system()).strip('"'),
        "processor": platform.machine(),
        "glibc": platform.libc_ver()[1],
        "container": container(),
        "virtualization": _virtualization(),
        "scheduler": "slurm" if "SLURM_JOB_ID" in os.environ else "",
        "user_id": os.getuid(),
        "effective_capabilities": int(status.get("CapEff", "0").strip(), 16),
        "kernel_command_line": " ".join(word for word in text("/proc/cmdline").split() if "iommu" in word),
        "modules": sorted(loaded & set(_MODULES) | built_in),
    }


def container() -> str:
    """What this process runs in; "" if nothing tells of a container."""
    if "KUBERNETES_SERVICE_HOST" in os.environ or Path("/var/run/secrets/kubernetes.io").exists():
        return "kubernetes"
    if Path("/.dockerenv").exists():
        return "docker"
    if Path("/run/.containerenv").exists():
        return "podman"
    if "APPTAINER_CONTAINER" in os.environ or "SINGULARITY_CONTAINER" in os.environ:
        return "apptainer"
    named = re.search(r"(?:^|\0)container=([^\0]*)", text("/proc/1/environ"))
    return named[1] or "container" if named else ""


def _virtualization() -> str:
    release = text("/proc/sys/kernel/osrelease").lower()
    if "microsoft" in release:
        return "wsl"
    maker = f"{text('/sys/class/dmi/id/sys_vendor')} {text('/sys/class/dmi/id/product_name')}".lower()
    kinds = {"kvm": "kvm", "qemu": "kvm", "amazon ec2": "kvm", "google": "kvm", "vmware": "vmware",
             "virtualbox": "virtualbox", "microsoft corporation virtual": "hyper-v", "xen": "xen"}  # fmt: skip
    named = next((kind for word, kind in kinds.items() if word in maker), "")
    return named or ("vm" if re.search(r"^flags.*\bhypervisor\b", text("/proc/cpuinfo"), re.MULTILINE) else "")


def _resolves(name: str) -> bool:
    """Whether the machine's own name has an address, asked by a process: a resolver may take half a minute."""
    code = f"import socket; socket.getaddrinfo({name!r}, None)"
    try:
        return not subprocess.run(  # noqa: S603 - the line above
            [sys.executable, "-I", "-c", code], capture_output=True, timeout=_LOOKUP_SECONDS, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        return False


def _python() -> dict[str, Any]:
    headers = Path(sysconfig.get_path("include"), "Python.h")
    compiler = next((found for name in ("gcc", "cc", "clang") if (found := shutil.which(name))), "")
    return {
        "python": platform.python_version(),
        "python_path": sys.executable,
        "python_headers": headers.exists(),
        "c_compiler": os.environ.get("CC") or compiler,
        "nvcc": _nvcc(),
    }


def _nvcc() -> str:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin")
    if not nvcc:
        return ""
    with suppress(OSError, subprocess.TimeoutExpired):
        told = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=2, check=False).stdout  # noqa: S603
        found = re.search(r"release ([\d.]+)", told)
        return found[1] if found else ""
    return ""


def _clock() -> dict[str, Any]:
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "time_zone": time.tzname[0],
        "clock_synchronised": _synchronised(),
        "encoding": locale.getencoding().lower(),
    }


def _synchronised() -> bool | None:
    """By the kernel's own account (adjtimex); containers may not ask, and answer None."""
    import ctypes

    class Timex(ctypes.Structure):
        _fields_ = [("modes", ctypes.c_uint), ("rest", ctypes.c_byte * 204)]

    with suppress(OSError, AttributeError):
        state: int = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(Timex(modes=0)))
        return None if state < 0 else state != 5  # TIME_ERROR: not synchronised
    return None


def _processors() -> dict[str, Any]:
    model = re.search(r"model name\s*: (.*)", text("/proc/cpuinfo"))
    allowed = sorted(os.sched_getaffinity(0))
    return {
        "model": model[1] if model else "",
        "visible": os.cpu_count() or 1,
        "usable": _quota(len(allowed)),
        "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1,
        "governor": text("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "allowed": allowed,
    }


def _quota(allowed: int) -> float:
    quota, _, period = text("/sys/fs/cgroup/cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit():
        return min(float(allowed), int(quota) / int(period))
    old, per = number("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), number("/sys/fs/cgroup/cpu/cpu.cfs_period_us")
    return min(float(allowed), old / per) if old and per and old > 0 else float(allowed)


def _memory() -> dict[str, Any]:
    lines = dict(line.split(":", 1) for line in text("/proc/meminfo").splitlines() if ":" in line)

    def of(name: str) -> int:
        return int(lines.get(name, "0").split()[0]) * 1024

    usable, total = usable_memory_bytes(), of("MemTotal")
    kills = re.search(r"^oom_kill (\d+)", text("/sys/fs/cgroup/memory.events"), re.MULTILINE)
    return {
        "total_bytes": total,
        "available_bytes": of("MemAvailable"),
        "limit_bytes": usable if usable < total else None,
        "oom_kills": int(kills[1]) if kills else None,
    }


def _limits() -> dict[str, Any]:
    def limit(which: int, place: int = 0) -> int | None:
        value = resource.getrlimit(which)[place]
        return None if value == resource.RLIM_INFINITY else value

    shm = {}
    with suppress(OSError):
        usage = shutil.disk_usage("/dev/shm")  # noqa: S108 - its size is asked for
        shm = {"shm_bytes": usage.total, "shm_free_bytes": usage.free}
    return {
        **shm,
        "memlock_bytes": limit(resource.RLIMIT_MEMLOCK),
        "open_files": limit(resource.RLIMIT_NOFILE),
        "open_files_hard": limit(resource.RLIMIT_NOFILE, 1),
        "processes": limit(resource.RLIMIT_NPROC),
        "pids": number("/sys/fs/cgroup/pids.max"),
    }


def _driver() -> dict[str, Any]:
    module = re.search(r"(?:Kernel Module|for x86_64|for aarch64)\s+(\d+\.[\d.]+)", text("/proc/driver/nvidia/version"))
    files = [_device(path) for path in sorted(Path("/dev").glob("nvidia*")) if path.is_char_device()]
    files += [_device(path) for path in (Path("/dev/dxg"),) if path.exists()]
    vendors = [(text(path / "vendor"), text(path / "class")) for path in _bus()]
    gpus = [vendor for vendor, kind in vendors if kind.startswith(("0x0300", "0x0302", "0x0380"))]
    return {
        "module": module[1] if module else "",
        "device_files": files,
        "on_bus": gpus.count("0x10de") if vendors else None,
        "switches": sum(vendor == "0x10de" and kind.startswith("0x0680") for vendor, kind in vendors),
        "amd": gpus.count("0x1002"),
        "libcuda": _libcuda(),
    }


def _bus() -> list[Path]:
    with suppress(OSError):
        return list(Path("/sys/bus/pci/devices").iterdir())
    return []


def _device(path: Path) -> dict[str, Any]:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return {"path": str(path), "usable": False, "error": error.strerror or str(error)}
    return {"path": str(path), "usable": True}


def _libcuda() -> str:
    """The file that a process which asks for libcuda.so.1 gets. In this process: it is one for readers."""
    import ctypes

    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ""
    mapped = re.search(r"(/\S*libcuda\.so\S*)", text("/proc/self/maps"))
    return mapped[1] if mapped else ""
