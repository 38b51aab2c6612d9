"""How often `hotloop explain` names the first cause, and how fast it reads: the logs of tests/logs, and one of 1 GB."""

import argparse
import resource
import tempfile
import time
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

from record import publish

from hotloop.explain.decide import decide
from hotloop.explain.scan import scan

LOGS = Path(__file__).parents[1] / "tests/logs"
_GIGABYTE = 10**9
FIRST_SCORE = {"logs": 135, "right": 131, "commit": "a137bed"}
"""Of the folders unseen*, before anybody who writes the rules had read them. The four were read then, and mended."""


def named(file: Path) -> str:
    """The first cause, or "healthy"."""
    with file.open("rb") as log:
        found = decide(scan(log))
    return found[0].id if found else "healthy"


def scored(folder: Path) -> dict[str, Any]:
    """Of one part of the corpus."""
    logs = tomllib.loads((folder / "corpus.toml").read_text())["log"]
    right = [log for log in logs if named(folder / log["file"]) == log["cause"]]
    features = Counter(feature for log in logs for feature in log["features"])
    return {
        "logs": len(logs),
        "right": len(right),
        "causes": len({log["cause"] for log in logs} - {"healthy", "unknown"}),
        "healthy": sum(log["cause"] == "healthy" for log in logs),
        "healthy_right": sum(log["cause"] == "healthy" for log in right),
        "provoked": sum(log["form"] == "provoked" for log in logs),
        "hard": sum(bool(log["features"]) for log in logs),
        "features": dict(features),
    }


def speed(size: int) -> dict[str, float]:
    """Seconds for a log of lines of training with warnings, repeated, that ends by running out of memory."""
    source = (LOGS / "composed/slurm_long_run_straggler_timeout.log").read_bytes()
    end = (LOGS / "composed/convnext_oom_torch113.log").read_bytes()
    with tempfile.NamedTemporaryFile(prefix="hotloop-bench-") as file:
        middle = b"\n".join(source.split(b"\n")[:2000]) + b"\n"
        while file.tell() < size:
            file.write(middle)
        file.write(end)
        file.flush()
        file.seek(0)
        started = time.perf_counter()
        found = decide(scan(file))  # type: ignore[arg-type]
        seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"bytes": size, "seconds": seconds, "peak_memory_bytes": peak, "right": found[0].id == "cuda-out-of-memory"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--bytes", type=int, default=_GIGABYTE)
    arguments = parser.parse_args()
    parts = {folder.name: scored(folder) for folder in sorted(LOGS.iterdir()) if folder.is_dir()}
    content = {
        "goals": {"top1": 0.95, "seconds": 60},
        "top1": sum(part["right"] for part in parts.values()) / sum(part["logs"] for part in parts.values()),
        "unseen_when_first_scored": FIRST_SCORE,
        "parts": parts,
        "large": speed(arguments.bytes),
    }
    publish("explain", content, arguments.json)


if __name__ == "__main__":
    main()
