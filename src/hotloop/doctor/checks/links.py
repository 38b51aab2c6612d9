"""What lies between cards, processors and memory."""

from collections.abc import Iterator

from hotloop.doctor.finding import Check, Seen
from hotloop.doctor.record import MachineRecord

_MANY_REPLAYS = 1000


def pcie(record: MachineRecord) -> Iterator[Seen]:
    """Width and generation. The generation drops at idle, so the current one says nothing; what is possible does."""
    for gpu in record.gpus:
        name = f"GPU {gpu.index} {gpu.name}"
        if gpu.virtualization == "vgpu" or record.system.virtualization == "wsl":
            continue
        width, widest = gpu.pcie_width, gpu.pcie_width_max
        if width and widest and width < widest:
            yield Seen("pcie-width", f"{name}: {width} of {widest} lanes")
        slot, card = gpu.pcie_generation_max, gpu.pcie_generation_device
        if slot and card and slot < card:
            yield Seen("pcie-generation", f"{name} could do generation {card}, its slot does {slot}")
        if gpu.pcie_replays and gpu.pcie_replays > _MANY_REPLAYS:
            yield Seen("pcie-replays", f"{name}: {gpu.pcie_replays} packets sent again")


def nvlink(record: MachineRecord) -> Iterator[Seen]:
    """Links that are there and down."""
    for gpu in record.gpus:
        if 0 < gpu.nvlinks_active < gpu.nvlinks:
            up = f"{gpu.nvlinks_active} of {gpu.nvlinks} links up"
            yield Seen("nvlink-down", f"GPU {gpu.index} {gpu.name}: {up}")


def peers(record: MachineRecord) -> Iterator[Seen]:
    """Cards that cannot read each other's memory though the way is short."""
    near = ("nvlink", "pix", "pxb", "internal")
    cut = {gpu.index for gpu in record.gpus if gpu.mig}  # parts have no peers
    for pair in record.pairs:
        if {pair.first, pair.second} & cut:
            continue
        if pair.path in near and pair.peer_read not in ("ok", ""):
            who = f"GPU {pair.first} and GPU {pair.second} ({pair.path})"
            yield Seen("peer-access-off", f"{who}: {pair.peer_read}")
            return


def iommu(record: MachineRecord) -> Iterator[Seen]:
    """An IOMMU in the way of copies between cards."""
    on = any(word in record.system.kernel_command_line for word in ("intel_iommu=on", "amd_iommu=on"))
    passes = "iommu=pt" in record.system.kernel_command_line
    over_pcie = any(pair.path not in ("nvlink", "") for pair in record.pairs)
    if on and not passes and over_pcie and not record.system.virtualization:
        yield Seen("iommu-on", f"kernel command line: {record.system.kernel_command_line}")


def acs(record: MachineRecord) -> Iterator[Seen]:
    """Bridges that keep cards from each other. Virtual machines need them so."""
    over_pcie = any(pair.path in ("pix", "pxb") for pair in record.pairs)
    if record.driver.acs and over_pcie and not record.system.virtualization:
        yield Seen("acs-on", f"{record.driver.acs} PCI bridges redirect copies between devices")


def numa(record: MachineRecord) -> Iterator[Seen]:
    """Processes that may run on the far side only."""
    allowed = set(record.processors.allowed)
    for gpu in record.gpus:
        near = set(gpu.processors)
        if record.processors.numa_nodes > 1 and near and allowed and not near & allowed:
            where = f"processors near it are {_range(near)}, this process may use {_range(allowed)}"
            yield Seen("numa-remote", f"GPU {gpu.index} {gpu.name}: {where}")


def _range(numbers: set[int]) -> str:
    return f"{min(numbers)}-{max(numbers)}"


CHECKS: tuple[Check, ...] = (pcie, nvlink, peers, iommu, acs, numa)
