"""`hotloop profile` on scripts with a known bottleneck: is the verdict right, and is the gain that it predicts the gain
that mending brings?

Each script of `bench/bottlenecks/` has one bottleneck, which `--mended` takes out. It is timed as it is; then
profiled, timed mended and timed as it is, several times over. Goals: every verdict right; predicted and real step times
after mending within 10 % of the step, in the median; watching lengthens a step by at most 2 %. With --gpus scripts that
need one run side by side, each on a GPU with its share of the processors, and then those that need two. The C library
keeps what is freed, in all of them: else what a mended script holds besides, batches say, spares it faults of pages.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from threading import Lock
from typing import Any

from places import Place, places, together
from record import Figure, add_device, of_this_source, publish, record

SCRIPTS = Path(__file__).parent / "bottlenecks"
_STARTS = 3
KEPT = {"MALLOC_TRIM_THRESHOLD_": str(2**34), "MALLOC_MMAP_THRESHOLD_": str(2**32)}
"""Computing took 15 ms of a step of input_no_workers without, and 6 to 12 ms once it was mended; with them 6 to 7 ms in
both (two cores)."""


@dataclass(frozen=True)
class Case:
    """A script and what is to be found in it.

    Attributes:
        verdict: what holds it up.
        findings: any of which names it; the gain of the first that is there is compared with the real one.
        on: devices on which it has its bottleneck.
        ranks: processes.
        named_on: devices on which a finding names it.
    """

    verdict: str
    findings: tuple[str, ...]
    on: tuple[str, ...] = ("cpu", "cuda")
    ranks: int = 1
    named_on: tuple[str, ...] = ("cpu", "cuda")


CASES = {
    "input_slow_transform": Case("input", ("input.slow_transform", "input.few_workers")),
    "input_no_workers": Case("input", ("input.no_workers",)),
    "input_slow_disk": Case("input", ("input.slow_storage",)),
    "input_one_worker": Case("input", ("input.slow_storage",)),
    "copy_bound": Case("copy", ("copy",), ("cuda",)),
    "launch_bound": Case("launch", ("launch",), ("cuda",)),
    "sync_bound": Case("sync", ("sync",), ("cuda",)),
    "compute_bound": Case("compute", ("compute.float32",), named_on=("cuda",)),
    "memory_thrash": Case("other", ("memory.thrash",), ("cuda",)),
    "thread_oversubscription": Case("compute", ("threads.oversubscribed",), ("cpu",)),
    "recompilation": Case("other", ("recompiles",)),
    "python_bound": Case("other", ("other.python",)),
    "slow_rank": Case("other", ("slow_rank",), ranks=2),
    "slow_link": Case("communication", ("communication",), ranks=2),
}


def started(name: str, case: Case, device: str, *options: str) -> list[str]:
    """The command that trains."""
    script = [str(SCRIPTS / f"{name}.py"), "--device", device, *options]
    if case.ranks == 1:
        return [sys.executable, *script]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={case.ranks}", *script]


def printed(command: list[str], place: Place) -> str:
    environment = {**place.environment, **KEPT}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=600, check=True, env=environment)
    return done.stdout


def seconds(command: list[str], place: Place) -> float:
    """A step's, as the script itself takes it.

    One that fails is started again: gloo aborts one in ten trainings of two ranks after their last step, without
    hotloop (torch 2.14, Python 3.11: "terminate called without an active exception").
    """
    for start in range(_STARTS):
        try:
            told = printed(command, place)
            break
        except subprocess.CalledProcessError:
            if start == _STARTS - 1:
                raise
    return float(json.loads(told.splitlines()[-1])["step_seconds"])


def profile(command: list[str], place: Place) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        whole = [sys.executable, "-m", "hotloop", "profile", "--json", "--out", f"{folder}/out", "--", *command]
        found: dict[str, Any] = json.loads(printed(whole, place))
    return found


def measured(name: str, device: str, rounds: int, steps: int, place: Place) -> dict[str, Any]:
    """What was found in one script, and what was true.

    The script as it is is timed before and after it is profiled: what else a host does changes from minute to minute.
    """
    case = CASES[name]
    named = device in case.named_on
    plain, mended, profiles, errors = [], [], [], []
    after = seconds(started(name, case, device, "--steps", str(steps)), place)
    for _ in range(rounds):
        before = after
        profiles.append(profile(started(name, case, device, "--steps", "100000"), place))
        mended.append(seconds(started(name, case, device, "--steps", str(steps), "--mended"), place))
        after = seconds(started(name, case, device, "--steps", str(steps)), place)
        plain.append((before + after) / 2)
        errors.append(abs(1 - gain_of(profiles[-1], case) - mended[-1] / plain[-1]))
    shares = [found["step_seconds"]["mean"] / each for found, each in zip(profiles, plain, strict=True)]
    return {
        "expected": asdict(case),
        "verdicts": [found["verdict"] for found in profiles],
        "right": all(found["verdict"] == case.verdict for found in profiles),
        "findings": [found["findings"][0]["id"] if found["findings"] else "" for found in profiles],
        "step_seconds": asdict(Figure.of(plain, "s")),
        "mended_seconds": asdict(Figure.of(mended, "s")),
        "gains": [gain_of(found, case) for found in profiles],
        "error": median(errors) if named else None,
        "errors": errors if named else [],
        "watched": asdict(Figure.of(shares, "x")),
        "overhead_ratio": asdict(Figure.of([found["overhead_ratio"] for found in profiles], "share")),
        "shares": [found["shares"] for found in profiles],
        "ablations": [found["ablations"] for found in profiles],
    }


def gain_of(found: dict[str, Any], case: Case) -> float:
    """What mending can bring at most, of the first finding that names the bottleneck; 0 without one."""
    return next((one["gain_at_most"] for one in found["findings"] if one["id"] in case.findings), 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--gpus", type=int, default=0, help="that scripts run on side by side")
    add_device(parser, for_cpus=True)
    arguments = parser.parse_args()
    device = arguments.device
    scripts = of_this_source(f"any_script_{device}").get("scripts", {})
    here, lock = places(arguments.gpus), Lock()

    def work(names: Iterator[str], place: Place) -> None:
        place.take()
        for name in names:
            one = measured(name, device, arguments.rounds, arguments.steps, place)
            error = "" if one["error"] is None else f", prediction off by {one['error']:.1%} of a step"
            print(f"{name}: {one['verdicts']} {one['findings']}{error}", file=sys.stderr, flush=True)
            with lock:
                scripts[name] = one
                record(f"any_script_{device}", content(scripts))  # a run that is cut off leaves what it has

    wanted = [name for name in arguments.only if device in CASES[name].on]
    with ThreadPoolExecutor(len(here)) as pool:
        list(pool.map(partial(work, iter([name for name in wanted if CASES[name].ranks == 1])), here))
    work(iter([name for name in wanted if CASES[name].ranks > 1]), together(here))
    publish(f"any_script_{device}", content(scripts), arguments.json)


def content(scripts: dict[str, Any]) -> dict[str, Any]:
    goals = {"verdicts": "all", "error": 0.10, "overhead_ratio": 0.02}
    return {"goals": goals, "right": sum(one["right"] for one in scripts.values()), "scripts": scripts}


if __name__ == "__main__":
    main()
