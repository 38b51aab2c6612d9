"""How long `hotloop doctor` takes beyond importing torch, which one of its processes does."""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict

from record import Figure, publish


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    beyond, importing = [], []
    for _ in range(1 + arguments.rounds):
        started = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "hotloop", "doctor", "--json"], stdout=subprocess.PIPE, timeout=300, check=False
        )
        seconds = time.perf_counter() - started
        importing.append(json.loads(done.stdout)["machine"]["torch"]["import_seconds"])
        beyond.append(seconds - importing[-1])
    content = {  # the first one reads files that the others find in memory
        "goal": 3.0,
        "beyond_import_seconds": asdict(Figure.of(beyond[1:], "s")),
        "import_seconds": asdict(Figure.of(importing[1:], "s")),
        "first": {"beyond_import_seconds": beyond[0], "import_seconds": importing[0]},
    }
    publish("doctor_time", content, arguments.json)


if __name__ == "__main__":
    main()
