"""Machines for the doctor's tests: two that were recorded, and others as such machines answer.

`h200.json` was recorded in a virtual machine with two H200s, `no_gpu.json` in one without a GPU; names, paths and
addresses were changed. The others are the first with what their kind answers differently: which readings are missing
under WSL, MIG and vGPU is what NVML's documentation says of them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hotloop.doctor.record import MachineRecord, load_record

_FOLDER = Path(__file__).parent / "machines"
Changes = Mapping[str, Any]
"""Paths into a record, "gpus.0.ecc_uncorrected", with what is there instead."""


def changed(record: MachineRecord, changes: Changes) -> MachineRecord:
    """The same with some values replaced."""
    raw = record.model_dump()
    for path, value in changes.items():
        *parents, last = path.split(".")
        place: Any = raw
        for parent in parents:
            place = place[int(parent)] if isinstance(place, list | tuple) else place[parent]
        place[last] = value
    return MachineRecord.model_validate(raw)


def _h200() -> MachineRecord:
    return load_record(_FOLDER / "h200.json")


_USER = {"system.user_id": 1000, "system.effective_capabilities": 0}
_BARE = {
    **_USER, "system.container": "", "system.virtualization": "", "system.clock_synchronised": True,
    "processors.governor": "performance", "environment.NVIDIA_VISIBLE_DEVICES": "all",
    "security.ssh_password": False, "security.ssh_root": "prohibit-password",
    **{f"gpus.{number}.virtualization": "" for number in (0, 1)},
}  # fmt: skip
_WSL_GONE = (
    "ecc", "ecc_pending", "ecc_uncorrected", "ecc_uncorrected_ever", "rows_remapped", "rows_pending", "rows_failed",
    "power_default_watts", "power_limit_watts", "persistence", "mig", "mig_pending", "numa_node",
    "temperature_slowdown_c", "clock_application_mhz", "clock_application_default_mhz",
)  # fmt: skip
_RTX = {
    "name": "NVIDIA GeForce RTX 4090", "capability": "8.9", "memory_bytes": 24 << 30, "memory_used_bytes": 4 << 20,
    "ecc": None, "ecc_pending": None, "nvlinks": 0, "nvlinks_active": 0, "mig": None, "mig_pending": None,
    "pcie_generation": 1, "pcie_generation_max": 4, "pcie_generation_device": 4, "fabric": "", "virtualization": "",
    "power_limit_watts": 450.0, "power_default_watts": 450.0, "clock_sm_max_mhz": 3105,
    "clock_application_mhz": None, "clock_application_default_mhz": None,
}  # fmt: skip


def _mig(record: MachineRecord) -> MachineRecord:
    gone = dict.fromkeys(("utilization", "clock_application_mhz", "temperature_slowdown_c"), None)
    parts = {"mig": True, "mig_pending": True, "mig_instances": 1, "nvlinks": 0, "nvlinks_active": 0, **gone}
    changes = {f"gpus.{number}.{name}": value for number in (0, 1) for name, value in parts.items()}
    return changed(record, {**_USER, **changes, "pairs": (), "rates": ()})


def _vgpu(record: MachineRecord) -> MachineRecord:
    gone = dict.fromkeys((*_WSL_GONE, "pcie_replays", "pcie_width", "pcie_generation_device"), None)
    part = {**gone, "name": "NVIDIA H100XM-40C", "virtualization": "vgpu", "nvlinks": 0, "nvlinks_active": 0}
    raw = record.gpus[0].model_dump() | part
    return changed(record, {**_USER, "gpus": (raw,), "pairs": (), "driver.on_bus": 1, "rates": ()})


def _recordings() -> dict[str, MachineRecord]:
    h200 = _h200()
    variables = {name: value for name, value in h200.environment.items() if name != "TORCH_CUDA_ARCH_LIST"}
    bare = changed(h200, {"environment": variables, **_BARE, "rates": ()})
    rtx = [bare.gpus[0].model_dump() | _RTX | {"index": number} for number in (0, 1)]
    wsl = {**_USER, "system.container": "", "system.virtualization": "wsl", "driver.on_bus": 0, "driver.module": ""}
    wsl |= {"driver.device_files": ({"path": "/dev/dxg", "usable": True},), "pairs": (), "rates": ()}
    wsl_card = rtx[0] | dict.fromkeys(_WSL_GONE, None)
    no_gpu = load_record(_FOLDER / "no_gpu.json")
    amd = {"driver.amd": 8, "system.modules": ("amdgpu",), "torch.version": "2.14.1+rocm7.2", "torch.cuda": ""}
    closed = [
        {"path": f"/dev/nvidia{n}", "usable": n < 2, "error": "" if n < 2 else "Operation not permitted"}
        for n in range(8)
    ]
    shared = (*bare.model_dump()["driver"]["device_files"][:2], *closed, {"path": "/dev/nvidiactl", "usable": True})
    ethernet = ({"name": "mlx5_0:1", "state": "down", "rate": "25 Gb/sec (1X EDR)", "kind": "Ethernet"},)
    slurm = {"SLURM_JOB_ID": "812", "CUDA_VISIBLE_DEVICES": "0,1", **bare.environment}
    ports = tuple(
        {"name": f"mlx5_{n}:1", "state": "active", "rate": "400 Gb/sec (4X NDR)", "kind": "InfiniBand"}
        for n in range(4)
    )
    return {
        "bare metal": bare,
        "workstation": changed(bare, {"gpus": rtx, "pairs": ({"first": 0, "second": 1, "path": "phb", "peer_read":
                                      "chipset not supported"},)}),
        "docker": changed(h200, {**_USER, "limits.shm_bytes": 16 << 30, "limits.shm_free_bytes": 16 << 30}),
        "Kubernetes pod": changed(h200, {**_USER, "system.container": "kubernetes", "processors.usable": 16.0,
                                         "limits.shm_bytes": 64 << 30, "limits.shm_free_bytes": 64 << 30,
                                         "memory.limit_bytes": 200 << 30, "memory.oom_kills": 0}),
        "Slurm node": changed(bare, {"system.scheduler": "slurm", "environment": slurm, "rdma": ports,
                                     "system.modules": ("ib_core", "nvidia", "nvidia_uvm", "nvidia_peermem")}),
        "Slurm job with some of the cards": changed(bare, {"system.scheduler": "slurm", "driver.on_bus": 8,
                                                           "driver.device_files": shared}),
        "a network card that could do RDMA": changed(bare, {"rdma": ethernet, "limits.memlock_bytes": 8 << 20}),
        "WSL": changed(bare, {**wsl, "gpus": (wsl_card,)}),
        "MIG": _mig(bare),
        "vGPU": _vgpu(bare),
        "several cards mixed": changed(bare, {"gpus": (bare.gpus[0].model_dump(), rtx[1]), "pairs": ()}),
        "no GPU": no_gpu,
        "AMD only": changed(no_gpu, amd),
        "driver without device files": changed(bare, {"driver.device_files": (), "driver.error": "NVML: Not Found",
                                                      "driver.version": "", "gpus": (), "pairs": ()}),
        "H200": h200,
    }  # fmt: skip


RECORDINGS = _recordings()
NOT_HEALTHY = {"driver without device files"}
