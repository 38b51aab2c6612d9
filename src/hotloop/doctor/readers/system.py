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

from hotloop.core.machine import cpu_quota, usable_memory_bytes
from hotloop.doctor.readers.text import number, text

_MODULES = ("nvidia", "nvidia_uvm", "nvidia_peermem", "nouveau", "ib_core", "amdgpu", "gdrdrv")
_LOOKUP_SECONDS = 2.0


def read() -> dict[str, Any]:
    """`system`, `processors`, `memory` and `limits`."""
    return {
        "system": {**_system(), **_python(), **_clock()},
        "processors": _processors(),
        "memory": _memory(),
        "limits": _limits(),
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
    told = named[1] if named else text("/run/systemd/container")
    overlay = re.search(r"^\S+ / overlay ", text("/proc/mounts"), re.MULTILINE)
    return told or ("container" if named or overlay else "")


def _virtualization() -> str:
    release = text("/proc/sys/kernel/osrelease").lower()
    if "microsoft" in release:
        return "wsl"
    maker = f"{text('/sys/class/dmi/id/sys_vendor')} {text('/sys/class/dmi/id/product_name')}".lower()
    kinds = {"kvm": "kvm", "qemu": "kvm", "amazon ec2": "kvm", "google": "kvm", "vmware": "vmware",
             "virtualbox": "virtualbox", "microsoft corporation virtual": "hyper-v", "xen": "xen"}  # fmt: skip
    named = next((kind for word, kind in kinds.items() if word in maker), "")
    return named or ("vm" if re.search(r"^flags.*\bhypervisor\b", text("/proc/cpuinfo"), re.MULTILINE) else "")


def _resolves(name: str) -> bool | None:
    """Whether the machine's own name has an address, asked by a process: resolvers may take half a minute: None."""
    code = f"import socket; socket.getaddrinfo({name!r}, None)"
    try:
        return not subprocess.run(  # noqa: S603 - the line above
            [sys.executable, "-I", "-c", code], capture_output=True, timeout=_LOOKUP_SECONDS, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        return None


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
        "encoding": "utf-8" if sys.flags.utf8_mode else locale.getencoding().lower(),
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
        "usable": cpu_quota(),
        "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1,
        "governor": text("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "allowed": allowed,
    }


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
