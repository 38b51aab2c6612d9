"""Kill a run at random moments and see what is lost.

A trial starts the demo's job (its 1,442 images, its network, smaller crops so that a run takes seconds), kills it with
SIGKILL at a random moment from its first breath to its last, starts it again, and compares the weights with those of
a run that was never killed. `python tests/faults/run.py --trials 50 --json`
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
LIMIT_SECONDS = 240.0
"""A start that takes longer than this hangs."""


@dataclass
class Faults:
    """What the trials showed.

    Attributes:
        trials: runs that were killed once and started again.
        resumed: of those, how many had a checkpoint to continue from.
        lost: steps done again that a checkpoint should have kept: more than `every` after the last save.
        hangs: starts over the limit.
        mismatches: ends whose weights differ from the undisturbed run's.
        errors: starts that ended otherwise than with 0.
    """

    trials: int = 0
    resumed: int = 0
    lost: int = 0
    hangs: int = 0
    mismatches: int = 0
    errors: int = 0


@dataclass(frozen=True)
class Trial:
    """The job under test.

    Attributes:
        settings: laid over the demo's job.
        every: steps between checkpoints.
    """

    images: Path
    settings: tuple[str, ...] = ("task.image_size=16", "train.epochs=3")
    every: int = 5

    def command(self, run: Path) -> list[str]:
        settings = (
            *self.settings,
            f"data.train={self.images}/train",
            f"data.val={self.images}/val",
            f"checkpoint.every={self.every} steps",
            "log.every=1",
            f"run.dir={run}",
        )
        options = [part for setting in settings for part in ("--set", setting)]
        return [
            sys.executable,
            "-m",
            "hotloop",
            "train",
            str(REPOSITORY / "examples/digits/job.toml"),
            *options,
            "--json",
        ]


def start(trial: Trial, run: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}
    return subprocess.Popen(
        trial.command(run), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, start_new_session=True
    )


def finish(trial: Trial, run: Path) -> tuple[dict[str, object] | None, bool]:
    """Run to the end: the result, or nothing, and whether it hung."""
    with start(trial, run) as process:
        try:
            output, _ = process.communicate(timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            return None, True
    return (json.loads(output) if process.returncode == 0 else None), False


def kill_once(trial: Trial, run: Path, after_seconds: float) -> int:
    """Start, kill after some seconds (if it is still there); the last step that was logged."""
    with start(trial, run) as process:
        try:
            process.communicate(timeout=after_seconds)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.communicate()
    lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
    steps = [json.loads(line)["step"] for line in lines if line.endswith("}")]
    return max(steps, default=0)


def newest_step(run: Path) -> int:
    return max((int(path.name.rsplit("-", 1)[-1]) for path in (run / "checkpoints").glob("epoch-*")), default=0)


def run_trials(trials: int, images: Path, seed: int = 0) -> Faults:
    """All trials, one after another."""
    faults = Faults()
    moments = random.Random(seed)
    trial = Trial(images)
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        expected, _ = finish(trial, Path(folder) / "undisturbed")
        whole_seconds = time.monotonic() - began
        assert expected, "the undisturbed run failed"
        for number in range(trials):
            run = Path(folder) / f"run{number}"
            reached = kill_once(trial, run, moments.uniform(0, whole_seconds))
            kept = newest_step(run)
            result, hung = finish(trial, run)
            faults.trials += 1
            faults.hangs += hung
            faults.errors += result is None and not hung
            faults.resumed += kept > 0
            faults.lost += reached - kept > trial.every
            faults.mismatches += result is not None and result["weights_sha256"] != expected["weights_sha256"]
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--images", type=Path, default=REPOSITORY / "examples/digits/images")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--record", action="store_true", help="write bench/results/kills.json")
    arguments = parser.parse_args()
    faults = asdict(run_trials(arguments.trials, arguments.images, arguments.seed))
    if arguments.record:
        sys.path.insert(0, str(REPOSITORY / "bench"))
        from record import publish

        publish("kills", faults, arguments.json)
    else:
        print(json.dumps(faults) if arguments.json else faults)


if __name__ == "__main__":
    main()
