"""A line for each group: what is there."""

from collections import Counter

from hotloop.core.units import format_bytes
from hotloop.doctor.record import MachineRecord, Rate


def summary(record: MachineRecord) -> dict[str, str]:
    """By group, and the probes' rates in lines under "rates"."""
    driver, torch, system = record.driver, record.torch, record.system
    names = Counter(gpu.name or "?" for gpu in record.gpus)
    cards = [f"{count} x {name} ({_card(name, record)})" for name, count in names.items()]
    links = Counter(pair.path for pair in record.pairs if pair.path)
    packages = [f"Python {system.python}"]
    if torch:
        cuda = f"CUDA {torch.cuda}, cuDNN {torch.cudnn}, NCCL {torch.nccl}" if torch.cuda else "without CUDA"
        packages.append(f"torch {torch.version} ({cuda})")
    if record.tensorflow:
        packages.append(f"TensorFlow {record.tensorflow.version}")
    memory = record.memory.limit_bytes or record.memory.total_bytes
    place = [system.os, system.container, system.virtualization, system.scheduler]
    free = {folder.path: format_bytes(folder.free_bytes) for folder in record.folders if not folder.error}
    up = [one.name for one in record.interfaces if one.up and one.name != "lo"]
    tried = any(rate.gpu is not None for rate in record.rates)
    return {
        "driver": f"{driver.version}, CUDA up to {driver.cuda}" if driver.version else "none",
        "cards": ", ".join(cards) or "none",
        "links": ", ".join(f"{path} {count}x" for path, count in links.items()),
        "packages": ", ".join(packages),
        "limits": f"{', '.join(filter(None, place))}; {record.processors.usable:g} processors, {format_bytes(memory)}",
        "storage": ", ".join(f"{path} {bytes_} free" for path, bytes_ in free.items()),
        "network": ", ".join(up + [f"{port.name} {port.rate}" for port in record.rdma]),
        "environment": f"{len(record.environment)} variables that matter",
        "clock": f"{system.time} {system.time_zone}",
        "probes": f"{len(record.rates)} results" + ("" if tried else ", none of a GPU"),
        "rates": "\n".join(map(_line, record.rates)),
    }


_TENSOR_CORES = {
    (7, 0): ("first", "fp16"), (7, 5): ("second", "fp16"), (8, 0): ("third", "fp16, bf16, tf32"),
    (8, 6): ("third", "fp16, bf16, tf32"), (8, 7): ("third", "fp16, bf16, tf32"),
    (8, 9): ("fourth", "fp16, bf16, tf32, float8"), (9, 0): ("fourth", "fp16, bf16, tf32, float8"),
    (10, 0): ("fifth", "fp16, bf16, tf32, float8, float4"), (10, 3): ("fifth", "fp16, bf16, tf32, float8, float4"),
    (12, 0): ("fifth", "fp16, bf16, tf32, float8, float4"), (12, 1): ("fifth", "fp16, bf16, tf32, float8, float4"),
}  # fmt: skip
"""Compute capability -> generation, and what they are fast in (CUDA programming guide, compute capabilities)."""


def _card(name: str, record: MachineRecord) -> str:
    """What a card is: architecture, memory, multiprocessors, tensor cores."""
    gpu = next(one for one in record.gpus if (one.name or "?") == name)
    if not gpu.capability:
        return gpu.error or "nothing known"
    major, minor = map(int, gpu.capability.split("."))
    devices = dict(zip(record.torch.devices, record.torch.multiprocessors, strict=False)) if record.torch else {}
    processors = f"{devices[name]} multiprocessors" if name in devices else ""
    generation, fast = _TENSOR_CORES.get((major, minor), ("", ""))
    cores = f"{generation} generation of tensor cores: {fast}" if generation else ""
    return ", ".join(filter(None, [f"sm_{major}{minor}", format_bytes(gpu.memory_bytes), processors, cores]))


def _line(rate: Rate) -> str:
    where = f"GPU {rate.gpu}, " if rate.gpu is not None else ""
    if rate.value is None:
        return f"{where}{rate.name}: {rate.error or 'right'}"
    should = f"{rate.value / rate.expected:.2f} of what it should be: {rate.source}" if rate.expected else ""
    if not should and rate.source:
        should = f"nothing to compare with: {rate.source}"
    notes = "; ".join(filter(None, [should, rate.said]))
    return f"{where}{rate.name}: {rate.value:.4g} {rate.unit}".rstrip() + (f" ({notes})" if notes else "")
