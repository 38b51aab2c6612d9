"""How long `hotloop --help` takes, as a whole process. The goal: at most 0.25 s on two cores."""

import argparse
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from record import Figure, publish

COMMAND = [shutil.which("hotloop", path=str(Path(sys.executable).parent)) or "hotloop", "--help"]


def seconds() -> float:
    started = time.perf_counter()
    subprocess.run(COMMAND, check=True, capture_output=True, timeout=30)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--runs", type=int, default=21)
    arguments = parser.parse_args()
    seconds()
    figure = Figure.of([seconds() for _ in range(arguments.runs)], "s")
    publish("help_time", {"seconds": asdict(figure), "goal": "median <= 0.25"}, arguments.json)


if __name__ == "__main__":
    main()
