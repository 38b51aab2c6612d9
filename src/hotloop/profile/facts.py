"""What is noted of a script's torch and model, besides times."""

import os
import platform
import resource
from pathlib import Path
from typing import Any


def script_facts(torch: Any, device: Any) -> dict[str, Any]:
    """Fields of `Measured` that stay as they are while the script runs."""
    gpu = device.type == "cuda"
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if torch.distributed.is_available() and torch.distributed.is_initialized():  # by hand, without torchrun
        rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return {
        "rank": rank,
        "world_size": world_size,
        "local_world_size": int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size))),
        "device": "cuda" if gpu else "cpu",
        "device_name": torch.cuda.get_device_name(device) if gpu else _processor(),
        "facts": {
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "processors": len(os.sched_getaffinity(0)),
            "tf32": torch.get_float32_matmul_precision() != "highest",
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
        },
    }


def allocator_counts(torch: Any, device: Any) -> dict[str, float]:
    """Of torch's allocator of a GPU, or the host's pages; names that begin with "num" count up."""
    if device.type != "cuda":
        return {"num_page_faults": resource.getrusage(resource.RUSAGE_SELF).ru_minflt}
    statistics = torch.cuda.memory_stats(device)
    free, total = torch.cuda.mem_get_info(device)
    return {
        "num_alloc_retries": statistics.get("num_alloc_retries", 0),
        "num_device_alloc": statistics.get("num_device_alloc", 0),
        "num_device_free": statistics.get("num_device_free", 0),
        "peak_bytes": statistics.get("allocated_bytes.all.peak", 0),
        "reserved_bytes": statistics.get("reserved_bytes.all.current", 0),
        "free_bytes": free,
        "total_bytes": total,
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
