"""What `hotloop doctor --deep` finds on an H200, beside what was measured on one by hand (2026-11-20).

Pageable copies go at the speed of the host's processor, and hosts differ: 6.2 GB/s by hand on one, 7.4 to 8.9 by the
doctor on others. So they are measured by hand on the same host, too, in turns with the doctor's own probe.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from record import publish

PAGEABLE = "host to device, pageable"
BY_HAND = {
    "matrix product, bf16": 774.0,
    "matrix product, fp16": 738.0,
    "matrix product, tf32": 402.0,
    "matrix product, fp32": 51.0,
    "device memory": 4000.0,
    "host to device, page-locked": 54.5,
    PAGEABLE: 6.2,
}
"""TFLOP/s and GB/s, medians with torch 2.11 and driver 580.159."""


TURNS = 5


def pageable_by_hand(gpu: int) -> float:
    """GB/s of copying 256 MiB of pageable memory to a GPU: the median of five, by the clock, after three."""
    import torch

    with torch.cuda.device(gpu):
        host = torch.empty(1 << 28, dtype=torch.uint8).fill_(1)
        device = torch.empty_like(host, device="cuda")
        seconds = []
        for _ in range(8):
            torch.cuda.synchronize()
            started = time.perf_counter()
            device.copy_(host)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
    return len(host) / statistics.median(seconds[3:]) / 1e9


def pageable_by_doctor(gpu: int) -> float:
    """GB/s that the doctor's own probe tells."""
    from hotloop.doctor.probing.probes import PROBES

    return next(value for name, value, *_ in PROBES["copies"](str(gpu)) if name == PAGEABLE)


def in_turns(gpu: int) -> dict[str, Any]:
    """Both ways to measure pageable copies, each in a process of its own: where memory lies differs by process."""
    ways = {"doctor": pageable_by_doctor, "by hand": pageable_by_hand}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(TURNS):
        for name, way in ways.items():
            code = f"import doctor_deep; print(doctor_deep.{way.__name__}({gpu}))"
            command = [sys.executable, "-c", code]
            done = subprocess.run(command, stdout=subprocess.PIPE, timeout=120, check=True, cwd=Path(__file__).parent)
            rates[name].append(float(done.stdout))
    medians = {name: statistics.median(each) for name, each in rates.items()}
    return {"GB/s": rates, "medians": medians, "of_by_hand": medians["doctor"] / medians["by hand"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "hotloop", "doctor", "--deep", "--json"],
        stdout=subprocess.PIPE,
        timeout=600,
        check=False,
    )
    seconds = time.perf_counter() - started
    found = json.loads(done.stdout)
    rates = found["machine"]["rates"]
    content: dict[str, Any] = {
        "goals": {"findings above note": 0, "of what was measured by hand": [0.9, 1.1], "seconds for a GPU": 60},
        "seconds": seconds,
        "gpus": len(found["machine"]["gpus"]),
        "findings": [{key: one[key] for key in ("id", "level", "evidence")} for one in found["findings"]],
        "rates": [{key: rate[key] for key in ("name", "gpu", "value", "unit", "error")} for rate in rates],
        "of_by_hand": {
            f"GPU {rate['gpu']}, {rate['name']}": rate["value"] / BY_HAND[rate["name"]]
            for rate in rates
            if rate["name"] in BY_HAND and rate["value"]
        },
    }
    gpus = {rate["gpu"] for rate in rates if rate["name"] == PAGEABLE and rate["value"]}
    content["pageable_in_turns"] = {f"GPU {gpu}": in_turns(gpu) for gpu in sorted(gpus)}
    publish("doctor_deep", content, arguments.json)


if __name__ == "__main__":
    main()
