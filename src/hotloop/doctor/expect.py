"""What a probe should find, and where that is from."""

import re
import tomllib
from functools import cache
from importlib import resources
from typing import Any

from hotloop.doctor.record import Gpu, Rate

_LANE_GB = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""GB/s of a lane each way, after the line's code (PCI-SIG)."""
_PCIE_REACHED = 0.86
"""54.5 of 63 GB/s: an H200 on 16 lanes of generation 5, 2026-11-20."""
_KEYS = {"device memory": "memory", **{f"matrix product, {name}": name for name in ("bf16", "fp16", "tf32", "fp32")}}


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(resources.files("hotloop.doctor").joinpath("expectations.toml").read_text())


def expected(rate: Rate, gpu: Gpu | None) -> Rate:
    """The same with what it should be, where anybody has said."""
    if gpu is None or rate.error:
        return rate
    if rate.name in ("host to device, page-locked", "device to host, page-locked"):
        generation, width = gpu.pcie_generation_max, gpu.pcie_width_max
        if not generation or not width or gpu.virtualization == "vgpu":
            return rate
        should = _PCIE_REACHED * width * _LANE_GB.get(generation, 0.0)
        source = f"{width} lanes of PCIe {generation}, of which an H200 reached {_PCIE_REACHED} (2026-11-20)"
        return rate.model_copy(update={"expected": should, "source": source})
    if rate.name == "PCIe lanes under load" and gpu.pcie_width_max:
        return rate.model_copy(update={"expected": gpu.pcie_width_max, "source": "what card and slot can"})
    if rate.name == "PCIe generation under load" and gpu.pcie_generation_max:
        return rate.model_copy(update={"expected": gpu.pcie_generation_max, "source": "what card and slot can"})
    key = _KEYS.get(rate.name)
    card = next((one for one in _table()["card"] if re.search(one["name"], gpu.name)), None)
    if key is None or card is None or key not in card or gpu.mig or gpu.virtualization == "vgpu":
        return rate
    if card.get("measured"):
        return rate.model_copy(update={"expected": card[key], "source": card["source"]})
    reached = _table()["reached"]
    source = f"{card['source']}: {card[key]:g}, of which an H200 reaches {reached[key]}"
    return rate.model_copy(update={"expected": card[key] * reached[key], "source": source})
