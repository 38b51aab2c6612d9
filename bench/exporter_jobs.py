"""What 10,000 jobs that come and go leave behind in `hotloop exporter`: no series and no memory.

The exporter runs as a user starts it, over a library of invented cards (stub_nvml.c). Jobs are files such as trainings
write, with names and metrics of their own, so many at a time; each generation is scraped once and taken away. Memory is
read after each thousand jobs.
"""

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path

from exporter import free_port, resident_bytes, running, scrape, stub
from record import publish

from hotloop.core.live import Live
from hotloop.monitor.demo import Demo
from hotloop.monitor.metrics import FRESH_SECONDS

AT_A_TIME = 50


def begin(folder: Path, number: int, like: Live) -> Path:
    """The file of a job that nothing before was named like."""
    job = replace(
        like, pid=1_000_000 + number, job=f"job-{number}", run=f"/runs/job-{number}", heartbeat=time.time(),
        metrics={f"metric-{number}": 1.0},
    )  # fmt: skip
    file = folder / f"job-{number}.json"
    file.write_text(json.dumps({"format": 1, **asdict(job)}))
    return file


def series(text: str) -> dict[str, int]:
    """How many in all, and of jobs that this bench began."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {"all": len(lines), "of_jobs": sum('job_name="job-' in line for line in lines)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--jobs", type=int, default=10_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        environment = stub(Path(name))
        live, like, port = Path(environment["HOTLOOP_LIVE"]), Demo().jobs().jobs[0], free_port()
        command, url = [sys.executable, "-m", "hotloop", "exporter"], f"http://127.0.0.1:{port}/metrics"
        with running([*command, "--port", str(port)], url, environment) as pid:
            for _ in range(3):  # rates are there from the second on
                before = series(scrape(url))
                time.sleep(FRESH_SECONDS)
            most, memory = 0, []
            for first in range(0, arguments.jobs, AT_A_TIME):
                files = [begin(live, number, like) for number in range(first, first + AT_A_TIME)]
                time.sleep(FRESH_SECONDS)
                most = max(most, series(scrape(url))["of_jobs"])
                memory.append(resident_bytes(pid))
                for file in files:
                    file.unlink()
            time.sleep(FRESH_SECONDS)
            after = series(scrape(url))
    thousands = memory[1000 // AT_A_TIME - 1 :: 1000 // AT_A_TIME]
    content = {
        "goals": {"series": 0, "resident_bytes": 0},
        "jobs": arguments.jobs,
        "at_a_time": AT_A_TIME,
        "series_of_jobs_at_most": most,
        "series_before": before,
        "series_after": after,
        "resident_bytes_by_thousands": thousands,
    }
    publish("exporter_jobs", content, arguments.json)


if __name__ == "__main__":
    main()
