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

from hotloop.doctor.readers.text import number, text

_PREFIXES = ("CUDA_", "CUDNN_", "NCCL_", "NVIDIA_", "TORCH", "PYTORCH_", "OMP_", "MKL_", "OPENBLAS_", "XLA_", "TF_",
             "SLURM_", "UCX_", "KMP_", "TRITON_", "CUBLAS_", "OMPI_MCA_btl", "GLOO_", "TP_")  # fmt: skip
_NAMES = ("LD_LIBRARY_PATH", "LD_PRELOAD", "CC", "CXX", "PYTHONPATH", "TZ", "LANG", "LC_ALL", "HF_HUB_OFFLINE",
          "MALLOC_ARENA_MAX", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # fmt: skip
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
_LISTENING = "0A"
_LOG_BYTES = 4 << 20
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)(.*)")


def read() -> dict[str, Any]:
    """`environment`, `interfaces`, `rdma`, `security`, `xids` and `kernel_log`."""
    xids, readable = _kernel_log()
    return {
        "environment": _variables(),
        "interfaces": list(_interfaces()),
        "rdma": list(_rdma()),
        "security": _security(),
        "xids": xids,
        "kernel_log": readable,
    }


def _variables() -> dict[str, str]:
    """No value that may be a secret leaves this function."""
    chosen = {name: value for name, value in os.environ.items() if name in _NAMES or name.startswith(_PREFIXES)}
    return {name: value for name, value in sorted(chosen.items()) if not _SECRET.search(name)}


def _interfaces() -> Iterator[dict[str, Any]]:
    for path in sorted(Path("/sys/class/net").glob("*")):
        speed = number(path / "speed")
        yield {
            "name": path.name,
            "up": text(path / "operstate") == "up" or path.name == "lo",
            "speed_mbit": speed if speed and speed > 0 else None,
            "addresses": [],
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
    sshd = _sshd()
    sockets = ("/var/run/docker.sock", "/run/containerd/containerd.sock", "/run/podman/podman.sock")
    return {
        "ssh_password": sshd.get("passwordauthentication", "yes") == "yes" if sshd is not None else None,
        "ssh_root": (sshd or {}).get("permitrootlogin", ""),
        "listeners": list(_listeners()),
        "readable_keys": _readable_keys(),
        "container_socket": next((path for path in sockets if Path(path).exists()), ""),
    }


def _sshd() -> dict[str, str] | None:
    """What sshd was told, the first word for each key as it takes them; None where it is not there or not readable."""
    main = Path("/etc/ssh/sshd_config")
    if not (content := text(main)):
        return None
    found: dict[str, str] = {}
    included = [text(path) for path in sorted(Path("/etc/ssh/sshd_config.d").glob("*.conf"))]
    for line in "\n".join([*included, content]).splitlines():
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
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            target = os.readlink(link)
            if target.startswith("socket:["):
                owners[target[8:-1]] = text(link.parents[1] / "comm")
    return owners


def _readable_keys() -> list[str]:
    """Private keys that others than their owner can read."""
    places = [Path.home() / ".ssh", Path("/etc/ssh")]
    found = []
    for folder in places:
        with contextlib.suppress(OSError, RuntimeError):
            for path in sorted(folder.iterdir()):
                secret = path.suffix != ".pub" and path.name.startswith(("id_", "ssh_host_")) and path.is_file()
                if secret and path.stat().st_mode & 0o077:
                    found.append(str(path))
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
    found = [
        {"number": int(match[2]), "bus_id": match[1], "line": line.strip()[:300]}
        for line in content.splitlines()
        if (match := _XID.search(line))
    ]
    return found[-50:], True
