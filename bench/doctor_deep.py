"""What `hotloop doctor --deep` finds on an H200, beside what was measured on one by hand (2026-11-20).

Pageable copies go at the speed of the host's processor, and hosts differ: 6.2 GB/s by hand on one, 7.4 and 9.3 by the
doctor on another. So they are measured by hand again, on the same GPU right after.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
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


def pageable_by_hand(gpu: int) -> float:
    """GB/s of copying pageable memory to a GPU: the median of nine, by the clock."""
    import torch

    with torch.cuda.device(gpu):
        host = torch.ones(1 << 28, dtype=torch.uint8)
        device = torch.empty_like(host, device="cuda")
        seconds = []
        for _ in range(12):
            torch.cuda.synchronize()
            started = time.perf_counter()
            device.copy_(host)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
    return len(host) / statistics.median(seconds[3:]) / 1e9


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
    for rate in rates:
        if rate["name"] == PAGEABLE and rate["value"]:
            here = pageable_by_hand(rate["gpu"])
            content["of_by_hand"][f"GPU {rate['gpu']}, {PAGEABLE}, measured by hand here"] = rate["value"] / here
    publish("doctor_deep", content, arguments.json)


if __name__ == "__main__":
    main()
