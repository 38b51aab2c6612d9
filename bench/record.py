"""What every benchmark writes down: figures with spread and n, versions, machine, date, command."""

import argparse
import hashlib
import json
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hotloop.core.machine import read_machine

RESULTS = Path(__file__).parent / "results"
SOURCE = Path(__file__).parents[1] / "src" / "hotloop"


@dataclass(frozen=True)
class Figure:
    """A measured figure: median with lowest and highest of n."""

    median: float
    low: float
    high: float
    n: int
    unit: str

    @classmethod
    def of(cls, values: Sequence[float], unit: str) -> "Figure":
        return cls(statistics.median(values), min(values), max(values), len(values), unit)


def processor() -> str:
    """The CPU's name and caches' size do not matter here; the name does."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def source() -> str:
    """Which code was measured, by its bytes: in a copy of the tree the commit may be an older one."""
    digest = hashlib.sha256()
    for file in sorted(SOURCE.rglob("*.py")):
        digest.update(f"{file.relative_to(SOURCE)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def commit() -> str:
    """The last commit of the tree that was measured; "-dirty" if files had been changed since."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    found = subprocess.run(command, cwd=RESULTS.parent, capture_output=True, text=True, timeout=10, check=False)
    return found.stdout.strip() or "unknown"


def add_device(parser: argparse.ArgumentParser, for_cpus: bool = False) -> None:
    """Add `--device`: without a GPU a bench only shows that it runs, with tiny sizes, and records nothing.

    Args:
        for_cpus: it is one for them, too.
    """
    import torch  # not above: some benches need none

    found = torch.cuda.is_available()
    if not found and not for_cpus:
        print("no GPU here: tiny sizes on the CPU, figures that mean nothing, nothing recorded", file=sys.stderr)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if found else "cpu")


def of_ranks(bench: str, ranks: int) -> str:
    """A record's name: the bench's own for four GPUs, as its goals say; fewer or more do not write over that."""
    return bench if ranks == 4 else f"{bench}_{ranks}_gpus"


def record(name: str, content: dict[str, Any]) -> dict[str, Any]:
    """Write `results/NAME.json`: the content with machine, versions, date and command."""
    machine = asdict(read_machine())
    machine.pop("hostname")
    whole = {
        "bench": name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.argv]),
        "commit": commit(),
        "source_sha256": source(),
        "machine": {**machine, "processor": processor()},
        **content,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(whole, indent=2) + "\n")
    return whole


def record_so_far(name: str, content: dict[str, Any], device: str) -> None:
    """Of a bench on GPUs that takes minutes: what it has, marked as a part of it, for a run that is cut off."""
    if device == "cuda":
        record(name, {**content, "partial": True})


def of_this_source(name: str) -> dict[str, Any]:
    """What is recorded of the very source that is here, if anything is: a bench can be measured part by part."""
    file = RESULTS / f"{name}.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return found if found.get("source_sha256") == source() else {}


def publish(name: str, content: dict[str, Any], as_json: bool) -> None:
    """Record it and print it, or a line a figure."""
    whole = record(name, content)
    if as_json:
        print(json.dumps(whole))
    else:
        for key, value in content.items():
            print(f"{key}: {value}")
