"""Variables that bear on training, the network, what listens, keys, and the kernel's log."""

import contextlib
import os
import re
import socket
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hotloop.core.secrets import is_secret
from hotloop.doctor.readers.text import number, readable, text

_PREFIXES = ("CUDA_", "CUDNN_", "NCCL_", "NVIDIA_", "TORCH", "PYTORCH_", "OMP_", "MKL_", "OPENBLAS_", "XLA_", "UCX_",
             "KMP_", "TRITON_", "CUBLAS_", "GLOO_")  # fmt: skip
_NAMES = (
    "LD_LIBRARY_PATH", "LD_PRELOAD", "CC", "CXX", "PYTHONPATH", "TZ", "LANG", "LC_ALL", "HF_HUB_OFFLINE", "RANK",
    "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "MALLOC_ARENA_MAX", "TP_SOCKET_IFNAME", "SLURM_JOB_ID",
    "SLURM_NNODES", "SLURM_NTASKS", "SLURM_CPUS_PER_TASK", "SLURM_GPUS_ON_NODE", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS",
    "TF_FORCE_GPU_ALLOW_GROWTH", "TF_GPU_ALLOCATOR", "TF_XLA_FLAGS", "TF_CPP_MIN_LOG_LEVEL", "TF_GPU_THREAD_MODE",
)  # fmt: skip
_SECRET_NAME = re.compile(r"TOKEN|KEY|SECRET|PASS|PWD|CRED|JWT|AUTH|_PAT$", re.IGNORECASE)
_LISTENING = "0A"
_SSH = 22
_LOG_BYTES = 4 << 20
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)(.*)")


def read() -> dict[str, Any]:
    """`environment`, `interfaces`, `rdma`, `security`, `xids` and `kernel_log`."""
    xids, log_read = _kernel_log()
    return {
        "environment": _variables(),
        "interfaces": list(_interfaces()),
        "rdma": list(_rdma()),
        "security": _security(),
        "xids": xids,
        "kernel_log": log_read,
    }


def _variables() -> dict[str, str]:
    """No value that may be a secret leaves this function."""
    chosen = {name: value for name, value in os.environ.items() if name in _NAMES or name.startswith(_PREFIXES)}
    told = {name: readable(value) for name, value in sorted(chosen.items()) if not _SECRET_NAME.search(name)}
    return {name: value for name, value in told.items() if not is_secret(value)}


def _interfaces() -> Iterator[dict[str, Any]]:
    for path in sorted(Path("/sys/class/net").glob("*")):
        speed = number(path / "speed")
        yield {
            "name": path.name,
            "up": text(path / "operstate") in ("up", "unknown"),  # tunnels and the loopback do not tell
            "speed_mbit": speed if speed and speed > 0 else None,
        }


def _rdma() -> Iterator[dict[str, Any]]:
    for port in sorted(Path("/sys/class/infiniband").glob("*/ports/*")):
        yield {
            "name": f"{port.parents[1].name}:{port.name}",
            "state": text(port / "state").partition(":")[2].strip().lower(),
            "rate": text(port / "rate"),
            "kind": text(port / "link_layer"),
        }


def _security() -> dict[str, Any]:
    listeners = list(_listeners())
    sshd = _sshd() if any(one["port"] == _SSH for one in listeners) else None
    sockets = ("/var/run/docker.sock", "/run/containerd/containerd.sock", "/run/podman/podman.sock")
    return {
        "ssh_password": sshd.get("passwordauthentication", "yes") == "yes" if sshd is not None else None,
        "ssh_root": (sshd or {}).get("permitrootlogin", ""),
        "listeners": listeners,
        "readable_keys": _readable_keys(),
        "container_socket": next((path for path in sockets if Path(path).exists()), ""),
    }


def _sshd() -> dict[str, str] | None:
    """What sshd was told, the first word for each key as it takes them; None where a part of it cannot be read."""
    main = Path("/etc/ssh/sshd_config")
    try:
        content = main.read_text(errors="replace")
        included = re.search(r"^\s*Include\s+/etc/ssh/sshd_config\.d/", content, re.MULTILINE)
        parts = sorted(Path("/etc/ssh/sshd_config.d").glob("*.conf")) if included else []
        texts = [*(path.read_text(errors="replace") for path in parts), content]
    except OSError:
        return None
    found: dict[str, str] = {}
    for one in texts:
        for line in one.splitlines():
            words = line.split()
            if words and words[0].lower() == "match":
                break
            if len(words) > 1 and not words[0].startswith("#"):
                found.setdefault(words[0].lower(), words[1].lower())
    return found


def _listeners() -> Iterator[dict[str, Any]]:
    """Sockets on every address; with the process where it may be seen."""
    owners: dict[str, str] | None = None
    seen = set()
    for file, everywhere in (("/proc/net/tcp", "00000000"), ("/proc/net/tcp6", "0" * 32)):
        for line in text(file).splitlines()[1:]:
            words = line.split()
            address, _, port = words[1].partition(":")
            if words[3] != _LISTENING or address != everywhere or int(port, 16) in seen:
                continue
            seen.add(int(port, 16))
            owners = _socket_owners() if owners is None else owners
            shown = socket.inet_ntoa(struct.pack("<L", 0)) if len(address) == 8 else "::"
            yield {"port": int(port, 16), "address": shown, "process": owners.get(words[9], "")}


def _socket_owners() -> dict[str, str]:
    owners = {}
    for process in os.listdir("/proc"):
        with contextlib.suppress(OSError):  # others' processes, and those that end meanwhile
            for link in os.scandir(f"/proc/{process}/fd") if process.isdigit() else ():
                target = os.readlink(link.path)
                if target.startswith("socket:["):
                    owners[target[8:-1]] = text(f"/proc/{process}/comm")
    return owners


def _readable_keys() -> list[str]:
    """Private keys that others can read; keys of hosts may belong to a group of their own."""
    found = []
    for folder, allowed in (("~/.ssh", 0o077), ("/etc/ssh", 0o007)):
        with contextlib.suppress(OSError, RuntimeError):
            for path in sorted(Path(folder).expanduser().iterdir()):
                secret = path.suffix != ".pub" and path.name.startswith(("id_", "ssh_host_")) and path.is_file()
                if secret and path.stat().st_mode & allowed:
                    found.append(readable(str(path)))
    return found


def _kernel_log() -> tuple[list[dict[str, Any]], bool]:
    """Errors of cards in the kernel's log, which as a rule root alone can read."""
    content = ""
    try:
        content = subprocess.run(
            ["dmesg"],  # noqa: S607 - wherever the system has it
            capture_output=True,
            text=True,
            errors="replace",
            timeout=2,
            check=True,
        ).stdout[-_LOG_BYTES:]
    except (OSError, subprocess.SubprocessError):
        for name in ("/var/log/kern.log", "/var/log/messages"):
            with contextlib.suppress(OSError):
                with open(name, "rb") as file:
                    file.seek(max(0, os.stat(name).st_size - _LOG_BYTES))
                    content = file.read().decode(errors="replace")
                break
        else:
            return [], False
    content = content[max(0, content.rfind(" Linux version ")) :]  # files hold earlier starts too
    found = [
        {"number": int(match[2]), "bus_id": match[1], "line": line.strip()[:300]}
        for line in content.splitlines()
        if (match := _XID.search(line))
    ]
    return found[-50:], True
