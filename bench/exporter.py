"""What `hotloop exporter` costs the machine that it watches: 8 cards and 8 jobs, a scrape a second.

The goals: at most 10 ms of CPU and 50 ms by the clock a scrape, at most 60 MB, and half of nvitop-exporter's of both,
which reads the cards each second of itself. Both are scraped at even times, as Prometheus does it. Both talk through
pynvml to a library of invented cards (stub_nvml.c) that answers at once: what a real driver takes is not in here, but
with `--cards`, which reads the cards of this machine. The jobs are invented there too. A round of all takes 50 s, with
`--cards` 35 s.
"""

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from record import Figure, publish

from hotloop.monitor.demo import Demo

HERE = Path(__file__).parent
RIVAL = find_spec("nvitop_exporter")
INTERVAL_SECONDS = 1.0
"""Between scrapes; nvitop-exporter reads as often by default, so that CPU a scrape is one reading's of both."""
FIRST = 4
"""Scrapes that are not measured: from the third on an interval is known."""


def stub(folder: Path) -> dict[str, str]:
    """An environment in which NVML is the stub, and eight processes train."""
    compiler = shutil.which("cc")
    if not compiler:
        sys.exit("no C compiler: cc is needed for the stub of NVML")
    library = folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", library, HERE / "stub_nvml.c"], check=True)
    return {**training(folder), "LD_LIBRARY_PATH": str(folder)}


def training(folder: Path) -> dict[str, str]:
    """An environment in which eight processes train."""
    live = folder / "live"
    live.mkdir()
    for number, job in enumerate(Demo().jobs().jobs):
        (live / f"{number}.json").write_text(json.dumps({"format": 1, **asdict(job)}))
    return {**os.environ, "HOTLOOP_LIVE": str(live)}


@contextmanager
def running(command: list[str], url: str, environment: dict[str, str]) -> Iterator[int]:
    """An exporter that answers; its process."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    try:
        while True:
            try:
                scrape(url)
                break
            except OSError:
                assert process.poll() is None, f"{command[0]} ended"
                time.sleep(0.1)
        yield process.pid
    finally:
        process.terminate()
        process.wait(30)


def scrape(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        text: str = answer.read().decode()
    return text


def cpu_seconds(pid: int) -> float:
    """All that a process has used, to the nanosecond: clock_getcpuclockid(3)."""
    return time.clock_gettime((~pid << 3) | 2)


def resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in status if line.startswith("VmRSS")))


@dataclass(frozen=True)
class Scraped:
    """What an exporter took for each scrape of a round, in seconds, and what it then held."""

    cpu: list[float]
    wall: list[float]
    resident_bytes: int
    lines: list[str]


def measure(command: list[str], url: str, environment: dict[str, str], scrapes: int) -> Scraped:
    wall, cpu = [], []
    with running(command, url, environment) as pid:
        used, due = 0.0, time.monotonic()
        for _ in range(FIRST + scrapes):
            due += INTERVAL_SECONDS
            time.sleep(max(0.0, due - time.monotonic()))
            started = time.perf_counter()
            text = scrape(url)
            wall.append(time.perf_counter() - started)
            time.sleep(INTERVAL_SECONDS / 2)  # half between two: whatever is done for one is counted with it
            used, before = cpu_seconds(pid), used
            cpu.append(used - before)
        return Scraped(cpu[FIRST:], wall[FIRST:], resident_bytes(pid), text.splitlines())


def figures(rounds: list[Scraped]) -> dict[str, Any]:
    """Of all rounds of an exporter."""
    last = rounds[-1]
    return {
        "series": sum(not line.startswith("#") for line in last.lines),
        "series_of_jobs": sum(line.startswith("hotloop_job_") for line in last.lines),
        "cpu_seconds_each": asdict(Figure.of([value for one in rounds for value in one.cpu], "s")),
        "wall_seconds_each": asdict(Figure.of([value for one in rounds for value in one.wall], "s")),
        "resident_bytes": max(one.resident_bytes for one in rounds),
    }


def ratios(ours: list[Scraped], theirs: list[Scraped]) -> dict[str, Any]:
    """Ours over theirs, of each round's medians: what the machine is slower at for a minute slows both."""
    pairs = list(zip(ours, theirs, strict=True))
    cpu = [median(one.cpu) / median(other.cpu) for one, other in pairs]
    wall = [median(one.wall) / median(other.wall) for one, other in pairs]
    return {"cpu": asdict(Figure.of(cpu, "")), "wall": asdict(Figure.of(wall, ""))}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=5, help="each exporter by turns")
    parser.add_argument("--scrapes", type=int, default=8, help="of a round")
    parser.add_argument("--cards", action="store_true", help="those of this machine instead of invented ones")
    arguments = parser.parse_args()
    content: dict[str, Any] = {
        "goals": {"cpu_seconds": 0.010, "wall_seconds": 0.050, "resident_bytes": 60_000_000, "of_nvitop": 0.5},
        "interval_seconds": INTERVAL_SECONDS,
    }
    hotloop = [sys.executable, "-m", "hotloop", "exporter"]
    nvitop = [sys.executable, "-m", "nvitop_exporter", "--bind-address", "127.0.0.1"]
    rival = f"nvitop-exporter {version('nvitop-exporter')}" if RIVAL else ""
    with tempfile.TemporaryDirectory() as name:
        environment = training(Path(name)) if arguments.cards else stub(Path(name))
        cases = {"hotloop": hotloop} if arguments.cards else {"hotloop, demo": [*hotloop, "--demo"], "hotloop": hotloop}
        if rival:
            cases[rival] = nvitop
        else:
            print("not compared: nvitop-exporter is missing (pip install nvitop-exporter)", file=sys.stderr)
        measured: dict[str, list[Scraped]] = {case: [] for case in cases}
        for number in range(arguments.rounds + 1):
            for case, command in cases.items():
                port = free_port()
                url = f"http://127.0.0.1:{port}/metrics"
                command = [*command, "--port", str(port)]
                if number:
                    measured[case].append(measure(command, url, environment, arguments.scrapes))
                else:
                    with running(command, url, environment):
                        pass  # whoever is first compiles modules for all: it would look larger than the next
    content |= {case: figures(rounds) for case, rounds in measured.items()}
    if rival:
        content["of_nvitop"] = ratios(measured["hotloop"], measured[rival])
    publish("exporter_cards" if arguments.cards else "exporter", content, arguments.json)


if __name__ == "__main__":
    main()
