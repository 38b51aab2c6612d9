"""Variables that slow a training, break it, or contradict each other."""

from collections.abc import Iterator

from hotloop.doctor.finding import Check, Seen
from hotloop.doctor.record import MachineRecord

_LEFT_ON = {
    "CUDA_LAUNCH_BLOCKING": ("launch-blocking", ("1",)),
    "TORCH_DISTRIBUTED_DEBUG": ("distributed-debug", ("DETAIL",)),
    "NVIDIA_TF32_OVERRIDE": ("tf32-override", ("0",)),
    "TORCH_COMPILE_DISABLE": ("compile-disabled", ("1",)),
    "TORCHDYNAMO_DISABLE": ("compile-disabled", ("1",)),
    "CUDA_CACHE_DISABLE": ("cuda-cache-disabled", ("1",)),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("allocator-off", ("1",)),
    "NCCL_DEBUG": ("nccl-debug", ("INFO", "TRACE")),
    "CUDA_MODULE_LOADING": ("eager-loading", ("EAGER",)),
    "TORCH_NCCL_BLOCKING_WAIT": ("nccl-blocking", ("1",)),
    "NCCL_SHM_DISABLE": ("nccl-shm-disabled", ("1",)),
}
"""Variable -> finding, and the values that are one."""
_ALLOCATOR_KEYS = {
    "max_split_size_mb", "garbage_collection_threshold", "expandable_segments", "backend", "roundup_power2_divisions",
    "roundup_bypass_threshold_mb", "release_lock_on_cudamalloc", "pinned_use_cuda_host_register",
    "pinned_num_register_threads", "pinned_use_background_threads", "graph_capture_record_stream_reuse",
    "pinned_reserve_segment_size_mb", "per_process_memory_fraction", "max_non_split_rounding_mb",
    "throw_on_cudamalloc_oom", "pinned_max_round_threshold_mb", "large_segment_size_mb", "pinned_max_cached_size_mb",
    "pinned_free_catch_all", "release_lock_on_hipmalloc", "pinned_use_hip_host_register",
}  # fmt: skip
"""c10/core/AllocatorConfig.cpp and c10/cuda/CUDAAllocatorConfig.h of torch 2.14, and of earlier ones."""


def left_on(record: MachineRecord) -> Iterator[Seen]:
    """Switches for debugging and the like."""
    for variable, (id_, values) in _LEFT_ON.items():
        value = record.environment.get(variable, "")
        if value.upper() in values:
            yield Seen(id_, f"{variable}={value}", f"unset {variable}")


def threads(record: MachineRecord) -> Iterator[Seen]:
    """More threads than processors."""
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        value = record.environment.get(variable, "")
        if value.isdigit() and int(value) > record.processors.usable:
            most = max(1, int(record.processors.usable))
            evidence = f"{variable}={value} with {record.processors.usable:g} processors"
            yield Seen("too-many-threads", evidence, f"export {variable}={most}")


def allocator(record: MachineRecord) -> Iterator[Seen]:
    """PYTORCH_CUDA_ALLOC_CONF and its later name."""
    old, new = (record.environment.get(name) for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
    if old and new and old != new:
        evidence = f"PYTORCH_CUDA_ALLOC_CONF={old}, PYTORCH_ALLOC_CONF={new}"
        yield Seen("alloc-conf-twice", evidence)
    for value in {one for one in (old, new) if one}:
        outer = _outer(value)
        wrong = [key for key in outer if key not in _ALLOCATOR_KEYS]
        if wrong:
            yield Seen("alloc-conf-invalid", f"{value}: torch knows no {wrong[0]}")
        if outer.get("backend") == "cudaMallocAsync" and "expandable_segments" in outer:
            yield Seen("alloc-conf-invalid", f"{value}: cudaMallocAsync has no expandable_segments")


def _outer(value: str) -> dict[str, str]:
    """Keys and values outside of brackets: roundup_power2_divisions:[256:1,512:2]."""
    depth, text = 0, ""
    for sign in value:
        depth += (sign == "[") - (sign == "]")
        text += ";" if depth and sign in ":," else sign
    pairs = [part.partition(":") for part in text.split(",") if part.strip()]
    return {key.strip(): rest.strip() for key, _, rest in pairs}


def nccl(record: MachineRecord) -> Iterator[Seen]:
    """What takes the fast ways between cards away."""
    given = record.environment
    if given.get("NCCL_P2P_DISABLE") == "1" and len(record.gpus) > 1:
        paths = {pair.path for pair in record.pairs}
        way = "NVLink" if "nvlink" in paths else "PCIe"
        yield Seen("nccl-p2p-disabled", f"NCCL_P2P_DISABLE=1, the GPUs are joined by {way}", "unset NCCL_P2P_DISABLE")
    if given.get("NCCL_P2P_DISABLE") == "1" and "NCCL_P2P_LEVEL" in given:
        yield Seen("nccl-contradiction", f"NCCL_P2P_DISABLE=1 and NCCL_P2P_LEVEL={given['NCCL_P2P_LEVEL']}")
    if given.get("NCCL_IB_DISABLE") == "1" and "NCCL_IB_HCA" in given:
        yield Seen("nccl-contradiction", f"NCCL_IB_DISABLE=1 and NCCL_IB_HCA={given['NCCL_IB_HCA']}")


def building(record: MachineRecord) -> Iterator[Seen]:
    """Variables for extensions."""
    chosen = record.environment.get("TORCH_CUDA_ARCH_LIST", "")
    numbers = {part.strip().split("+")[0].rstrip("af") for part in chosen.replace(";", " ").split()}
    for gpu in record.gpus:
        major = gpu.capability.split(".")[0]
        own = [number for number in numbers if number.split(".")[0] == major and number <= gpu.capability]
        numeric = all(number[:1].isdigit() for number in numbers)
        if numbers and numeric and gpu.capability and not own and "PTX" not in chosen:
            yield Seen("arch-list", f"TORCH_CUDA_ARCH_LIST={chosen}; {gpu.name} is {gpu.capability}")
            break
    preload = record.environment.get("LD_PRELOAD", "")
    if "libasan" in preload or "libtsan" in preload:
        yield Seen("sanitizer-preloaded", f"LD_PRELOAD={preload}", "unset LD_PRELOAD")


CHECKS: tuple[Check, ...] = (left_on, threads, allocator, nccl, building)
