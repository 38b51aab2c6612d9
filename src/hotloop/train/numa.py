"""Ranks on the processors that lie next to their GPUs, where a machine has several memory nodes."""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

_NOWHERE = -1


def gpu_addresses(number: int) -> list[str]:
    """Of the first GPUs that this process sees, as the kernel names them: "0000:19:00.0"."""
    found = []
    for index in range(min(number, torch.cuda.device_count())):
        of: Any = torch.cuda.get_device_properties(index)
        found.append(f"{of.pci_domain_id:04x}:{of.pci_bus_id:02x}:{of.pci_device_id:02x}.0")
    return found


def processors_next_to(gpus: Sequence[str], rank: int, allowed: set[int], root: Path = Path("/")) -> set[int]:
    """The processors for a rank and its workers; empty where they may stay as they are.

    That is, on one memory node, or if one of the nodes has none of these GPUs: its processors would be idle.

    Args:
        gpus: of all ranks of this machine, in their order.
        rank: of which.
        allowed: processors that this process may use.
    """
    nodes = _nodes(allowed, root)
    of_gpus = [_node(root / "sys/bus/pci/devices" / gpu / "numa_node") for gpu in gpus]
    return nodes[of_gpus[rank]] if len(nodes) > 1 and set(of_gpus) == set(nodes) else set()


def has_several_nodes(allowed: set[int], root: Path = Path("/")) -> bool:
    """Whether these processors lie on more than one memory node."""
    return len(_nodes(allowed, root)) > 1


def processors_of_one_node(gpu: str, allowed: set[int], root: Path = Path("/")) -> set[int]:
    """The processors of one memory node; empty where it is not known, or there is no other.

    Args:
        gpu: whose node it is; without one, it is the node with the most of them.
        allowed: processors that this process may use.
    """
    nodes = _nodes(allowed, root)
    if len(nodes) < 2:
        return set()
    node = _node(root / "sys/bus/pci/devices" / gpu / "numa_node") if gpu else max(nodes, key=lambda n: len(nodes[n]))
    return nodes.get(node, set())


def stay_on_one_node(device: str) -> None:
    """Keep this process and what it starts on the processors of one memory node, its first GPU's or the largest.

    Args:
        device: a job's, "auto" too.
    """
    gpu = next(iter(gpu_addresses(1)), "") if device != "cpu" else ""
    if chosen := processors_of_one_node(gpu, os.sched_getaffinity(0)):
        _keep_on(chosen)
        torch.set_num_threads(min(torch.get_num_threads(), len(chosen)))


def bind(rank: int, ranks: int) -> str:
    """Keep this process and what it starts next to its GPU; says so in a line, "" if all may stay as it is."""
    allowed = os.sched_getaffinity(0)
    gpus = gpu_addresses(ranks)
    chosen = processors_next_to(gpus, rank, allowed) if len(gpus) == ranks else set()
    if not chosen:
        return ""
    _keep_on(chosen)
    return f"GPU {rank} trains on the {len(chosen)} of {len(allowed)} processors that lie next to it"


def _keep_on(processors: set[int]) -> None:
    """This process, with the threads that it has already: those that talk to other ranks, say."""
    before = os.sched_getaffinity(0)
    for thread in [int(task.name) for task in Path("/proc/self/task").iterdir()]:
        with suppress(ProcessLookupError):  # it has just ended
            if os.sched_getaffinity(thread) == before:  # others were put where they are, by OMP_PROC_BIND say
                os.sched_setaffinity(thread, processors)


def _nodes(allowed: set[int], root: Path) -> dict[int, set[int]]:
    """Memory nodes, and which of these processors lie on each; without those that none lies on."""
    found = {
        int(folder.name.removeprefix("node")): _processors(folder / "cpulist") & allowed
        for folder in (root / "sys/devices/system/node").glob("node[0-9]*")
    }
    return {node: processors for node, processors in found.items() if processors}


def _node(file: Path) -> int:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return _NOWHERE


def _processors(file: Path) -> set[int]:
    """A kernel's list, such as "0-3,8"."""
    try:
        parts = [part.partition("-") for part in file.read_text().strip().split(",") if part]
        return {each for first, _, last in parts for each in range(int(first), int(last or first) + 1)}
    except (OSError, ValueError):
        return set()
