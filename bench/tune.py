"""`hotloop tune` against an exhaustive grid over the same settings: how far is what it finds from the best, and at what
cost?

The job trains a small ResNet on JPEG files of handwritten digits (`make demo` makes them), or is another one, such as
examples/text with --set data.train=FILE and --values speed.compile=3 precision=3 speed.graph=2 speed.kernels=2
threads=3. Each point of the grid is one trial of the length that the search gives its own at most. Both begin with
nothing compiled, after a trial that is not counted: the first one on a machine reads its libraries from the disk. Then
the best points of the grid and what the search has found are repeated by turns. With --gpus several points of the grid
are tried at once, each on a GPU with its share of the processors, and so are the repeats; the search has the first one.
Goals: at most 3 % from the best, at most 15 % of the grid's cost.
"""

import argparse
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median

from places import Place, places
from record import Figure, add_device, publish

from hotloop.core.job import Job
from hotloop.core.tuning import Settings, Trial, Tuning
from hotloop.tune.job_trials import JobTrials
from hotloop.tune.search import Effort, Search
from hotloop.tune.space import Knob, start_of
from hotloop.tune.targets import job_target

DIGITS = Path("examples/digits/job.toml")
BOTH = {"data.workers": 5, "precision": 2, "speed.channels_last": 2, "speed.compile": 2}
VALUES = {
    "cpu": {**BOTH, "threads": 2, "speed.keep_memory": 2},
    "cuda": {**BOTH, "speed.cudnn_benchmark": 2, "speed.graph": 2},
}
"""Settings of the digits' grid, and how many of their values."""


def one(space: Sequence[Knob], settings: Settings, start: JobTrials, effort: Effort) -> Trial:
    """A single trial of some settings."""
    return Search(space, start, effort, lambda trial: None).trial(settings)


@contextmanager
def nothing_compiled() -> Iterator[None]:
    """What trials compile is kept from one to the next, and thrown away at the end."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
        yield


def part_of_grid(
    space: Sequence[Knob], points: Iterator[Settings], job: Job, effort: Effort, place: Place
) -> tuple[list[Trial], float]:
    """Trials of the next points, as long as there are some, and how many seconds they took."""
    place.take()
    began, trials = time.monotonic(), []
    with JobTrials(job, place.environment) as start:
        for settings in points:
            trials.append(one(space, settings, start, effort))
            told(trials[-1])
    return trials, time.monotonic() - began


def repeated(
    space: Sequence[Knob], contenders: Sequence[Settings], turns: Iterator[int], job: Job, effort: Effort, place: Place
) -> list[list[float]]:
    """Seconds a sample of each contender, for each of the next turns, as long as there are some."""
    place.take()
    with JobTrials(job, place.environment) as start:
        return [[one(space, settings, start, effort).sample_seconds for settings in contenders] for _ in turns]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--job", type=Path, default=DIGITS)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the job; may be repeated")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--values", nargs="*", metavar="SETTING=N", help="the first N values of these make the grid")
    parser.add_argument("--gpus", type=int, default=0, help="that points of the grid are tried on side by side")
    add_device(parser, for_cpus=True)
    arguments = parser.parse_args()
    here = places(arguments.gpus)
    here[0].take()
    asked = (each.partition("=") for each in arguments.values or ())
    kept = {name: int(count) for name, _, count in asked} or VALUES[arguments.device]
    every, _, job = job_target(arguments.job, [f"device={arguments.device}", *arguments.set])
    space = tuple(replace(knob, values=knob.values[: kept[knob.name]]) for knob in every if knob.name in kept)
    effort = Effort(budget_seconds=24 * 3600.0)

    with JobTrials(job, here[0].environment) as start:
        with nothing_compiled():
            one(space, start_of(space), start, effort)
        began = time.monotonic()
        with nothing_compiled():
            found = Search(space, start, effort, told).run((str(arguments.job),))
        searched = time.monotonic() - began

    names = [knob.name for knob in space]
    every_point = itertools.product(*(knob.values for knob in space))
    # Of a list, as threads share it: a generator cannot be asked by two at once.
    points = iter([dict(zip(names, values, strict=True)) for values in every_point])
    with nothing_compiled(), ThreadPoolExecutor(len(here)) as pool:
        parts = list(pool.map(partial(part_of_grid, space, points, job, effort), here))
        grid = [trial for trials, _ in parts for trial in trials]
        exhausted = sum(seconds for _, seconds in parts)
        best = sorted((trial for trial in grid if trial.sample_seconds), key=lambda trial: trial.sample_seconds)[:3]
        contenders = [found.best, *(trial.settings for trial in best)]
        turns = iter(list(range(arguments.repeats)))
        times = list(itertools.chain(*pool.map(partial(repeated, space, contenders, turns, job, effort), here)))
    cost = {"search_seconds": searched, "grid_seconds": exhausted, "cost": searched / exhausted, "grid_on": len(here)}
    content = {**compared(contenders, times), **cost, **of_search(found, grid)}
    other = "" if arguments.job == DIGITS else f"_{arguments.job.parent.name}"
    publish(f"tune_{arguments.device}{other}", content, arguments.json)


def compared(contenders: Sequence[Settings], times: Sequence[Sequence[float]]) -> dict[str, object]:
    """What the search has found, the first of these, against the best of all."""
    medians = [median(column) for column in zip(*times, strict=True)]
    return {
        "goals": {"from_best": 0.03, "cost": 0.15},
        "from_best": medians[0] / min(medians) - 1,
        "found": dict(contenders[0]),
        "best_of_grid": dict(contenders[1 + medians[1:].index(min(medians[1:]))]),
        "sample_seconds": [asdict(Figure.of(list(column), "s")) for column in zip(*times, strict=True)],
    }


def of_search(found: Tuning, grid: Sequence[Trial]) -> dict[str, object]:
    return {
        "combinations": len(grid),
        "trials": len(found.trials),
        "times_as_fast": found.ratio,
        "search": [row(trial) for trial in found.trials],
        "grid": [row(trial) for trial in grid],
    }


def row(trial: Trial) -> dict[str, object]:
    return {"values": list(trial.settings.values()), "sample_seconds": trial.sample_seconds, "took": trial.took_seconds}


def told(trial: Trial) -> None:
    print(f"{trial.sample_seconds:.5f} {trial.state} {dict(trial.settings)} {trial.why}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    main()
