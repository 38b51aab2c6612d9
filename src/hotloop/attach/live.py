"""A script that trains, made known to whoever watches the machine."""

import atexit
from pathlib import Path
from typing import Any

from hotloop.core.live import Publisher, live_folder, number_in_environment, script_name


def publisher_of_script(torch: Any, device: Any, way: str, folder: Path) -> Publisher:
    """What tells of this process until it ends.

    Args:
        device: of what is trained.
        way: "run" or "profile".
        folder: of this start, by whose name it is told from others of the same script.
    """
    publisher = Publisher(
        live_folder(), way=way, job=script_name(), run=str(folder), rank=number_in_environment("RANK", 0),
        ranks=number_in_environment("WORLD_SIZE", 1), gpu=gpu_uuid(torch, device), phase="step",
    )  # fmt: skip
    atexit.register(publisher.close)
    return publisher


def gpu_uuid(torch: Any, device: Any) -> str:
    """As NVML has it; "" for a CPU, and where torch does not tell."""
    if device.type != "cuda":
        return ""
    found = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return f"GPU-{found}" if found else ""
