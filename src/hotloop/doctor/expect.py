"""What a probe should find, and where that is from."""

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import takewhile
from typing import Any

from hotloop.doctor.record import Gpu, MachineRecord, Rate

_LANE_GB = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""GB/s of a lane each way, after the line's code (PCI-SIG)."""
_PCIE_REACHED = 0.86
"""54.5 of 63 GB/s: an H200 on 16 lanes of generation 5, 2026-11-20."""
_KEYS = {"device memory": "memory", **{f"matrix product, {name}": name for name in ("bf16", "fp16", "tf32", "fp32")}}
ALL_REDUCE, DECODE, DISK_READ = "NCCL all-reduce", "JPEG decoding on one processor", "disk, reading"
TENSORFLOW = "GPUs that TensorFlow sees"
"""How names of rates begin that are no card's."""


@dataclass(frozen=True)
class _Should:
    """What a rate should be; None with the reason why nobody can say."""

    value: float | None
    source: str


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(resources.files("hotloop.doctor").joinpath("expectations.toml").read_text())


def expected(rate: Rate, record: MachineRecord) -> Rate:
    """The same with what it should be, or why nobody can say."""
    if rate.error or rate.value is None:
        return rate
    if rate.gpu is not None:
        gpu = _gpu(rate.gpu, record)
        found = _of_card(rate.name, gpu) if gpu else None
    elif rate.name.startswith(ALL_REDUCE):
        found = _of_links(record)
    elif rate.name == DECODE:
        found = _Should(_table()["decode"]["images"], _table()["decode"]["source"])
    elif rate.name == DISK_READ:
        found = _of_disk(record)
    elif rate.name == TENSORFLOW:
        found = _of_tensorflow(record)
    else:
        found = None
    return rate.model_copy(update={"expected": found.value, "source": found.source}) if found else rate


def rates_of(name: str) -> tuple[dict[str, float], str]:
    """What a healthy card reaches, in TFLOP/s by precision and GB/s as "memory"; and where that is from."""
    card = _card(name)
    if card is None:
        return {}, ""
    reached = _table()["reached"]
    keys = [key for key in _KEYS.values() if key in card]
    if card.get("measured"):
        return {key: card[key] for key in keys}, card["source"]
    source = f"{card['source']}, of which an H200 reaches {reached['bf16']}"
    return {key: card[key] * reached[key] for key in keys}, source


def decode_rate() -> float:
    """Images a second that one processor decodes."""
    return float(_table()["decode"]["images"])


def _card(name: str) -> dict[str, Any] | None:
    return next((one for one in _table()["card"] if re.search(one["name"], name)), None)


def _gpu(number: int, record: MachineRecord) -> Gpu | None:
    """CUDA counts the GPUs that are visible, by its own order; of one kind they are all alike."""
    names = record.torch.devices if record.torch else ()
    return next((gpu for gpu in record.gpus if number < len(names) and gpu.name == names[number]), None)


def _of_card(name: str, gpu: Gpu) -> _Should | None:
    if name in ("host to device, page-locked", "device to host, page-locked"):
        generation, width = gpu.pcie_generation_max, gpu.pcie_width_max
        if not generation or not width or gpu.virtualization == "vgpu":
            return None
        source = f"{width} lanes of PCIe {generation}, of which an H200 reached {_PCIE_REACHED} (2026-11-20)"
        return _Should(_PCIE_REACHED * width * _LANE_GB.get(generation, 0.0), source)
    if name == "PCIe lanes under load" and gpu.pcie_width_max:
        return _Should(gpu.pcie_width_max, "what card and slot can")
    if name == "PCIe generation under load" and gpu.pcie_generation_max:
        return _Should(gpu.pcie_generation_max, "what card and slot can")
    key = _KEYS.get(name)
    card = _card(gpu.name)
    if key is None or card is None or key not in card or gpu.mig or gpu.virtualization == "vgpu":
        return None
    if card.get("measured"):
        return _Should(card[key], card["source"])
    reached = _table()["reached"]
    return _Should(
        card[key] * reached[key], f"{card['source']}: {card[key]:g}, of which an H200 reaches {reached[key]}"
    )


def _of_links(record: MachineRecord) -> _Should:
    """Bus bandwidth of an all-reduce over all cards that torch sees."""
    table, count = _table()["nvlink"], len(record.torch.devices) if record.torch else 0
    if not record.pairs or any(pair.path != "nvlink" for pair in record.pairs):
        return _Should(None, "not all cards are joined by NVLink: what PCIe carries depends on bridges and processors")
    if any(gpu.mig or gpu.virtualization == "vgpu" for gpu in record.gpus):
        return _Should(None, "parts of cards share their links")
    each = {table["rate"].get(gpu.capability) for gpu in record.gpus}
    if None in each:
        return _Should(None, "nobody has said what these cards' NVLinks carry")
    # Links that go to other cards directly lead to some of them alone; through a switch, all lead everywhere.
    straight = min(pair.nvlinks for pair in record.pairs)
    links = straight * (count - 1) if straight else min(gpu.nvlinks_active for gpu in record.gpus)
    if not links:
        return _Should(None, "the number of NVLinks is not told")
    source = f"{links} NVLinks of {min(each):g} GB/s ({table['source']}); {table['reached_source']}"
    return _Should(links * min(each) * table["reached"], source)


def _of_disk(record: MachineRecord) -> _Should:
    """Reading in the folder for temporary files."""
    kind = next((folder.kind for folder in record.folders if folder.role == "tmp" and not folder.error), "")
    if kind in ("nvme", "ssd", "hdd") and record.system.virtualization:
        return _Should(None, "a virtual machine's disk has the rate that its host gives it")
    if kind not in _table()["disk"]:
        return _Should(None, f"of its kind ({kind or 'not told'}) no rate is expected")
    return _Should(_table()["disk"][kind]["rate"], f"{kind}: {_table()['disk'][kind]['source']}")


def _of_tensorflow(record: MachineRecord) -> _Should | None:
    """As many GPUs as NVML sees, but for those that are hidden."""
    count = sum(not gpu.error for gpu in record.gpus)
    if not count:
        return None
    if record.tensorflow and not record.tensorflow.cuda:
        return _Should(None, "it was built without CUDA")
    if any(gpu.mig for gpu in record.gpus):
        return _Should(None, "parts of cards are counted otherwise")
    chosen = record.environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return _Should(count, "as NVML sees")
    return _Should(min(count, _chosen(chosen, count)), f"CUDA_VISIBLE_DEVICES={chosen} of {count} that NVML sees")


def _chosen(variable: str, count: int) -> int:
    """GPUs that CUDA_VISIBLE_DEVICES leaves: up to the first one that is not there."""
    parts = [part.strip() for part in variable.split(",")]
    return sum(
        1 for _ in takewhile(lambda part: part.startswith(("GPU-", "MIG-")) or part in map(str, range(count)), parts)
    )
