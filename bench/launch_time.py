"""How long `hotloop launch` takes to hand a job over, as a whole process. The goal: at most 2 s without network waits.

On this machine the job is really started (and cancelled); on Slurm, with --slurm, it is submitted to a real one that is
started here; of the others it is what would be sent, as they wait for a network.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from record import Figure, publish

REPOSITORY = Path(__file__).parents[1]
HOTLOOP = shutil.which("hotloop", path=str(Path(sys.executable).parent)) or "hotloop"
JOB = """
name = "line"
device = "cpu"
[task]
name = "tiny:Regression"
[data]
train = "made by the task"
batch_size = 4
[model]
name = "made by the task"
"""


def seconds(folder: Path, environment: dict[str, str], *options: str) -> float:
    """Of one launch, which is cancelled afterwards."""
    command = [HOTLOOP, "launch", "job.toml", *options, "--json"]
    started = time.perf_counter()
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60, cwd=folder, env=environment)
    taken = time.perf_counter() - started
    if "--dry-run" not in options:
        name = json.loads(done.stdout)["name"]
        subprocess.run(
            [HOTLOOP, "launch", "cancel", name], check=True, capture_output=True, cwd=folder, env=environment
        )
        subprocess.run([HOTLOOP, "launch", "logs", name, "--follow"], capture_output=True, cwd=folder, env=environment)
    return taken


@contextmanager
def a_slurm() -> Iterator[dict[str, str]]:
    sys.path.append(str(REPOSITORY / "tests/support"))
    from slurm import slurm

    with tempfile.TemporaryDirectory() as name, slurm(Path(name)) as cluster:
        yield {**os.environ, "SLURM_CONF": str(cluster.configuration)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--slurm", action="store_true", help="start one and submit to it")
    arguments = parser.parse_args()
    path = os.pathsep.join([str(REPOSITORY / "tests/support"), os.environ.get("PYTHONPATH", "")])
    os.environ["PYTHONPATH"] = path
    cases: dict[str, list[str]] = {"local": ["--on", "local"]}
    for engine in ("kubernetes", "ray"):
        cases[f"{engine}, not sent"] = ["--on", engine, "--gpus", "1", "--nodes", "2", "--dry-run"]
    found = {}
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "job.toml").write_text(JOB)
        for case, options in cases.items():
            taken = [seconds(Path(name), dict(os.environ), *options) for _ in range(arguments.runs + 1)]
            found[case] = asdict(Figure.of(taken[1:], "s"))
        if arguments.slurm:
            with a_slurm() as environment:
                options = ["--on", "slurm", "--set", 'launch.slurm.options=["--hold"]']
                taken = [seconds(Path(name), environment, *options) for _ in range(arguments.runs + 1)]
                found["slurm"] = asdict(Figure.of(taken[1:], "s"))
    publish("launch_time", {"seconds": found, "goal": "each median <= 2"}, arguments.json)


if __name__ == "__main__":
    main()
