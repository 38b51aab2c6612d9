"""The kernel's side of the driver. Opening a device file may hang as the driver does."""

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from hotloop.doctor.readers.text import text


def read() -> dict[str, Any]:
    """Parts of `driver`: the kernel module, device files, what the bus shows."""
    module = re.search(r"(?:Kernel Module|for x86_64|for aarch64)\s+(\d+\.[\d.]+)", text("/proc/driver/nvidia/version"))
    files = [_device(path) for path in sorted(Path("/dev").glob("nvidia*")) if path.is_char_device()]
    files += [_device(path) for path in (Path("/dev/dxg"),) if path.exists()]
    vendors = [(text(path / "vendor"), text(path / "class")) for path in _bus()]
    gpus = [vendor for vendor, kind in vendors if kind.startswith(("0x0300", "0x0302", "0x0380"))]
    return {
        "module": module[1] if module else "",
        "device_files": files,
        "on_bus": gpus.count("0x10de") if vendors else None,
        "amd": gpus.count("0x1002"),
        "acs": _redirecting(),
        "libcuda": _libcuda(),
    }


def _bus() -> list[Path]:
    """Devices of this machine's own: neither parts for virtual machines nor what is handed to one."""
    with suppress(OSError):
        devices = Path("/sys/bus/pci/devices").iterdir()
        return [one for one in devices if not (one / "physfn").exists() and _served_by(one) != "vfio-pci"]
    return []


_EXTENDED, _ACS = 0x100, 0x000D
_REDIRECT = 0x4 | 0x8
"""P2P request and completion redirect of the ACS control register (PCI Express base specification, 7.7.11)."""


def _redirecting() -> int | None:
    """Bridges with those bits set. Their settings beyond 256 bytes are root's to read."""
    found = None
    for device in _bus():
        if not text(device / "class").startswith("0x0604"):
            continue
        with suppress(OSError):
            settings = (device / "config").read_bytes()
            if len(settings) > _EXTENDED:
                found = (found or 0) + bool(_acs_control(settings) & _REDIRECT)
    return found


def _acs_control(settings: bytes) -> int:
    """The register, found along the list of extended capabilities; 0 if the bridge has none."""
    place = _EXTENDED
    while place:
        header = int.from_bytes(settings[place : place + 4], "little")
        if header & 0xFFFF == _ACS:
            return int.from_bytes(settings[place + 6 : place + 8], "little")
        following = header >> 20
        place = following if following > place else 0
    return 0


def _served_by(device: Path) -> str:
    with suppress(OSError):
        return (device / "driver").resolve(strict=True).name
    return ""


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
