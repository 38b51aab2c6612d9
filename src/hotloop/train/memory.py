"""Where memory goes: a report, marks in the course of a program, and what keeps growing."""

import linecache
import resource
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hotloop.core.process import most_resident_bytes
from hotloop.core.units import format_bytes

_TORCH = str(Path(torch.__file__).parent)


@dataclass(frozen=True)
class MemoryReport:
    """Memory of the GPU as torch's allocator sees it; of a CPU process, what is resident.

    Attributes:
        allocated_bytes: in tensors now.
        reserved_bytes: taken from the device, tensors or not.
        peak_bytes: the most that was in tensors.
        fragmented_bytes: reserved, free, and in pieces too small to give back.
        retries: how often the allocator had to give memory back and ask again: more than a few slow a training down.
        out_of_memory: how often there was none.
        free_bytes, total_bytes: of the whole device, other processes counted.
    """

    allocated_bytes: int
    reserved_bytes: int
    peak_bytes: int
    fragmented_bytes: int = 0
    retries: int = 0
    out_of_memory: int = 0
    free_bytes: int = 0
    total_bytes: int = 0

    @property
    def fragmentation(self) -> float:
        """Share of the reserved memory that is fragmented, 0 to 1."""
        return self.fragmented_bytes / self.reserved_bytes if self.reserved_bytes else 0.0

    def __str__(self) -> str:
        parts = [f"{format_bytes(self.allocated_bytes)} in tensors", f"{format_bytes(self.peak_bytes)} at the most"]
        if self.total_bytes:
            parts += [
                f"{format_bytes(self.reserved_bytes)} reserved, {100 * self.fragmentation:.0f} % of it fragmented",
                f"{self.retries} retries",
                f"{format_bytes(self.free_bytes)} of {format_bytes(self.total_bytes)} free",
            ]
        return ", ".join(parts)


def memory_report(device: torch.device | str | None = None) -> MemoryReport:
    """Memory of a device now; the current GPU, or the CPU's process without one. About 0.1 ms.

    Example:
        ```python
        print(hotloop.memory_report())
        ```
    """
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if chosen.type == "cpu":
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        resident = pages * resource.getpagesize()
        return MemoryReport(resident, resident, most_resident_bytes())
    counts = torch.cuda.memory_stats(chosen)
    free, total = torch.cuda.mem_get_info(chosen)
    return MemoryReport(
        allocated_bytes=counts.get("allocated_bytes.all.current", 0),
        reserved_bytes=counts.get("reserved_bytes.all.current", 0),
        peak_bytes=counts.get("allocated_bytes.all.peak", 0),
        fragmented_bytes=counts.get("inactive_split_bytes.all.current", 0),
        retries=counts.get("num_alloc_retries", 0),
        out_of_memory=counts.get("num_ooms", 0),
        free_bytes=free,
        total_bytes=total,
    )


def memory_trouble(report: MemoryReport) -> str:
    """Why a training that runs will not do; empty if its memory suffices."""
    return f"memory ran out and was freed {report.retries} times" if report.retries else ""


class MemoryMarks:
    """Reports at named points of a program, in order.

    Example:
        ```python
        marks = hotloop.MemoryMarks()
        model = Model().cuda()
        marks.mark("model")
        loss = model(batch)
        marks.mark("forward")
        print(marks)
        ```

    Attributes:
        reports: name and report of each mark.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self.reports: list[tuple[str, MemoryReport]] = []
        self._device = device

    def mark(self, name: str) -> None:
        """Take a report here."""
        self.reports.append((name, memory_report(self._device)))

    def __str__(self) -> str:
        width = max((len(name) for name, _ in self.reports), default=0)
        return "\n".join(f"{name:<{width}}  {report}" for name, report in self.reports)


@dataclass(frozen=True)
class Site:
    """A line that allocated memory which is still held."""

    line: str
    bytes: int
    count: int


class LeakDetector:
    """Notices memory that grows from one look to the next, and finds the lines that allocate it.

    Looks must be taken at the same place of a step. After `patience` looks in a row with more memory than before, the
    allocator starts to remember who allocates (about 2 µs an allocation, until the finding); after as many again, the
    lines are named. The first looks are left out: caches and lazy state grow then.

    Args:
        notify: told what grows, how fast, and where; once.
        patience: looks.
        least_bytes: growth over `patience` looks below which nothing is said.
    """

    _SKIPPED = 3

    def __init__(
        self, notify: Callable[[str], None], patience: int = 5, least_bytes: int = 1 << 20,
        read: Callable[[], int] = torch.cuda.memory_allocated,
    ) -> None:  # fmt: skip
        self._notify = notify
        self._patience = patience
        self._least_bytes = least_bytes
        self._read = read
        self._looks: list[tuple[int, int]] = []
        self._skipped = 0
        self._before: set[int] | None = None
        self._done = False

    def look(self, step: int) -> None:
        """Look at the memory after `step`. About 10 µs."""
        if self._done:
            return
        if self._skipped < self._SKIPPED:
            self._skipped += 1
            return
        allocated = self._read()
        if self._looks and allocated <= self._looks[-1][1]:
            self._looks.clear()
            self._stop_recording()
        self._looks.append((step, allocated))
        if len(self._looks) <= self._patience:
            return
        if self._looks[-1][1] - self._looks[-1 - self._patience][1] < self._least_bytes:
            return
        if self._before is None:
            self._start_recording()
        elif len(self._looks) > 2 * self._patience:
            self._tell()

    def _start_recording(self) -> None:
        torch.cuda.memory._record_memory_history(context="alloc", stacks="python")
        self._before = {address for address, _, _ in _blocks(torch.cuda.memory._snapshot())}

    def _stop_recording(self) -> None:
        if self._before is not None:
            torch.cuda.memory._record_memory_history(enabled=None)
            self._before = None

    def _tell(self) -> None:
        assert self._before is not None
        sites = held_since(self._before, torch.cuda.memory._snapshot())
        self._stop_recording()
        self._done = True
        (first, low), (last, high) = self._looks[0], self._looks[-1]
        where = "; ".join(f"{format_bytes(site.bytes)} in {site.count} from {site.line}" for site in sites[:3])
        rate = format_bytes((high - low) // max(1, last - first))
        self._notify(f"memory grows by {rate} a step, steps {first} to {last}: still held are {where or 'unknown'}")


def held_since(before: set[int], snapshot: dict[str, Any]) -> list[Site]:
    """What was allocated since and is still held, by line, largest first.

    Args:
        before: addresses of blocks that were held then.
        snapshot: of torch's allocator, with its stacks.
    """
    sizes: dict[str, list[int]] = defaultdict(list)
    for address, size, frames in _blocks(snapshot):
        if address not in before:
            sizes[_line(frames)].append(size)
    found = [Site(line, sum(each), len(each)) for line, each in sizes.items()]
    return sorted(found, key=lambda site: site.bytes, reverse=True)


def _blocks(snapshot: dict[str, Any]) -> list[tuple[int, int, list[dict[str, Any]]]]:
    return [
        (block["address"], block["size"], block.get("frames", []))
        for segment in snapshot["segments"]
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    ]


def _line(frames: list[dict[str, Any]]) -> str:
    """The innermost frame outside torch: its text, file and number."""
    own = [frame for frame in frames if not frame["filename"].startswith((_TORCH, "<", "??"))]
    if not own:
        return "an unknown line"
    file, number = own[0]["filename"], own[0]["line"]
    return f"`{linecache.getline(file, number).strip()}` ({file}, line {number})"


def peak_memory_bytes(device: torch.device) -> int:
    """The most that was allocated on the GPU; on a CPU, the most that the process had resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return most_resident_bytes()
