"""Disturb trainings at random moments and see what is lost.

A trial starts the demo's job, disturbs it, starts it again until it has finished, and compares the weights with those
of a run that was never disturbed: `python tests/faults/run.py --trials 100 --json`; half as many SIGTERMs, and so on.
With --jobs so many trials run side by side, each with its share of the processors. With --record those that were cut
off go on: what a record has of the same source, trials and seed is not tried again.

It takes `make demo`'s images, gcc for the slow disk, and root for the full one, which is mounted.
"""

import argparse
import hashlib
import json
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from faults.kinds import KINDS
from faults.trials import REPOSITORY, SETTINGS, Trial, started

_MOST_TRIES = 8
"""Of a trial whose training ends before anything could be done to it."""
_SAVED = re.compile(r"^saved .*-step-(\d+) in ", re.MULTILINE)
_COUNTS = ("trials", "resumed", "lost", "accepted", "hangs", "mismatches", "errors")


@dataclass
class Faults:
    """What trials showed.

    Attributes:
        trials: runs that were disturbed once and started again.
        resumed: of those, how many had a checkpoint to continue from, and did.
        lost: starts that went on from before a checkpoint that was said to be written, or is there.
        accepted: damaged checkpoints that were continued.
        hangs: starts over the limit, or that left processes behind for so long.
        mismatches: ends whose weights differ from the undisturbed run's.
        errors: starts that ended otherwise than they should.
        done: how often to whom or what, or when.
        notes: what was wrong, in words.
        numbers: of the trials, each of which has random moments of its own.
    """

    trials: int = 0
    resumed: int = 0
    lost: int = 0
    accepted: int = 0
    hangs: int = 0
    mismatches: int = 0
    errors: int = 0
    done: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)

    def wrong(self, what: str, note: str) -> None:
        setattr(self, what, getattr(self, what) + 1)
        self.notes.append(f"{what}: {note}")

    def add(self, more: "Faults") -> None:
        for what in _COUNTS:
            setattr(self, what, getattr(self, what) + getattr(more, what))
        for done, times in more.done.items():
            self.done[done] = self.done.get(done, 0) + times
        self.notes.extend(more.notes)
        self.numbers = sorted([*self.numbers, *more.numbers])


@dataclass(frozen=True)
class Undisturbed:
    """A run that nothing happened to.

    Attributes:
        weights: their hash.
    """

    weights: str
    seconds: float


def finish(trial: Trial, faults: Faults, damaged: str = "") -> str:
    """Start it, again perhaps; the hash of its weights, or nothing if it did not finish."""
    before = [path.name for path in trial.checkpoints if path.name != damaged]
    over = trial.run.exists() and (trial.run / "result.json").exists() and trial.result["status"] == "finished"
    with started(trial) as training:
        pass
    if training.hung:
        faults.wrong("hangs", f"{trial.setting}, started again")
        return ""
    if training.code:
        faults.wrong("errors", f"{trial.setting}, started again: code {training.code}: {training.err[-300:]}")
        return ""
    resumed_from = Path(trial.result["resumed_from"]).name
    if damaged and resumed_from == damaged:
        faults.wrong("accepted", damaged)
    elif not over and resumed_from != (before[-1] if before else ""):
        faults.wrong("lost", f"{before[-1:]} was there, and it went on from {resumed_from or 'nothing'}")
    faults.resumed += bool(resumed_from)
    return str(trial.result["weights_sha256"])


def went_back(err: str) -> str:
    """Where a training that was started again by itself went on from before what it had said was saved."""
    saved, begins = 0, False
    for line in err.splitlines():
        if line.startswith("run "):
            begins = True
        elif found := re.match(r"step (\d+)  loss", line):
            if begins and int(found[1]) <= saved:
                return f"step {saved} was saved, and it went on from step {int(found[1]) - 1}"
            begins = False
        elif found := _SAVED.match(line):
            saved = int(found[1])
    return ""


def disturb(kind: str, trial: Trial, moments: random.Random, undisturbed: Undisturbed) -> Faults:
    """One trial; nothing of it counts where nothing could be done."""
    faults = Faults(trials=1)
    outcome = KINDS[kind][0](trial, moments, undisturbed.seconds)
    if not outcome.done and not outcome.wrong and not outcome.hung:
        return Faults()
    faults.done = {outcome.done: 1}
    if outcome.wrong:
        faults.wrong("errors", f"{outcome.done}: {outcome.wrong}")
    if outcome.hung:
        faults.wrong("hangs", f"{trial.setting}, disturbed: {outcome.done}")
    err = trial.run.with_suffix(".err").read_text()
    kept, said = trial.newest_step, max((int(step) for step in _SAVED.findall(err)), default=0)
    if kept < said and not outcome.damaged:
        faults.wrong("lost", f"step {said} was saved, {kept} is there")
    if back := went_back(err):
        faults.wrong("lost", back)
    weights = finish(trial, faults, outcome.damaged)
    if weights and weights != undisturbed.weights:
        faults.wrong("mismatches", f"{trial.setting} from step {kept}")
    return faults


@contextmanager
def side_by_side(jobs: int) -> Iterator[ThreadPoolExecutor]:
    """Threads, each of which starts processes on processors of its own."""
    processors, shares = sorted(os.sched_getaffinity(0)), SimpleQueue[list[int]]()
    jobs = min(jobs, len(processors))
    size = len(processors) // jobs  # the same for all: sums over other numbers of threads differ in their last bits
    for job in range(jobs):
        shares.put(processors[job * size : (job + 1) * size])
    with ThreadPoolExecutor(jobs, initializer=lambda: os.sched_setaffinity(0, shares.get())) as pool:
        yield pool


def run_trials(
    counts: Mapping[str, int], images: Path, seed: int = 0, settings: Sequence[str] = (), jobs: int = 1,
    earlier: Mapping[str, Faults] = MappingProxyType({}),
    told: Callable[[dict[str, Faults]], None] = lambda found: None, source: Path = REPOSITORY / "src",
) -> dict[str, Faults]:  # fmt: skip
    """So many trials of each kind.

    Args:
        settings: only these; all that a kind is for if there are none.
        jobs: trials at a time.
        earlier: what some have shown already.
        told: after each, what all so far have shown.
        source: the folder of the package that is disturbed.
    """

    def leave_alone(setting: str) -> Undisturbed:
        began = time.monotonic()
        run = Path(folder, f"undisturbed-{setting}".replace(" ", "-"))
        weights = finish(Trial(images, run, setting), faults := Faults())
        assert weights, f"the undisturbed run failed: {faults.notes}"
        return Undisturbed(weights, time.monotonic() - began)

    def turn(kind: str, number: int) -> Faults:
        turns = [setting for setting in KINDS[kind][1] if setting in undisturbed]
        setting = turns[number % len(turns)]
        moments, faults = random.Random(f"{seed} {kind} {number}"), Faults()
        for attempt in range(_MOST_TRIES):
            run = Path(folder, f"{kind}{number}-{attempt}".replace(" ", "-"))
            trial = Trial(images, run, setting, number=number // len(turns), source=source)
            try:
                faults = disturb(kind, trial, moments, undisturbed[setting])
            except Exception as error:  # the others go on
                faults = Faults(trials=1)
                faults.wrong("errors", f"{setting}, the trial itself: {error!r}")
            if faults.trials:
                break
        else:
            faults = Faults(trials=1)
            faults.wrong("errors", f"{setting}: it ended before anything could be done, {_MOST_TRIES} times")
        faults.numbers = [number]
        print(
            f"{kind} {number + 1}/{counts[kind]} {setting}: {list(faults.done)} {faults.notes}",
            file=sys.stderr,
            flush=True,
        )
        return faults

    with tempfile.TemporaryDirectory() as folder, side_by_side(jobs) as pool:
        names = settings or [name for name in SETTINGS if any(name in KINDS[kind][1] for kind in counts)]
        undisturbed = dict(zip(names, pool.map(leave_alone, names), strict=True))
        found = {kind: earlier.get(kind, Faults()) for kind in counts}
        left = {kind: [number for number in range(count) if number not in found[kind].numbers]
                for kind, count in counts.items()}  # fmt: skip
        trials = {pool.submit(turn, kind, number): kind for kind, numbers in left.items() for number in numbers}
        for each in as_completed(trials):
            found[trials[each]].add(each.result())
            told(found)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=100, help="SIGKILLs; other kinds have a share of that")
    parser.add_argument("--only", action="append", choices=KINDS, help="kinds")
    parser.add_argument("--images", type=Path, default=REPOSITORY / "examples/digits/images")
    parser.add_argument("--jobs", type=int, default=1, help="trials at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--record", action="store_true", help="write bench/results/faults.json")
    arguments = parser.parse_args()
    if not (arguments.images / "train").is_dir():
        parser.error(f"no images at {arguments.images}: run `make demo` first, or give --images")
    counts = {kind: max(1, round(arguments.trials * KINDS[kind][2])) for kind in arguments.only or KINDS}
    sys.path.insert(0, str(REPOSITORY / "bench"))
    from record import of_this_source, publish, record

    recorded = of_this_source("faults") if arguments.record else {}
    harness = [Path(__file__).with_name(name).read_bytes() for name in ("run.py", "kinds.py", "trials.py")]
    trials_sha256 = hashlib.sha256(b"".join(harness)).hexdigest()[:16]
    same = recorded.get("seed") == arguments.seed and recorded.get("trials_sha256") == trials_sha256
    earlier = {kind: Faults(**one) for kind, one in recorded["kinds"].items()} if same else {}

    def content(found: dict[str, Faults]) -> dict[str, Any]:
        kinds = {kind: asdict(one) for kind, one in {**earlier, **found}.items() if one.trials}
        counts = {name: sum(one[name] for one in kinds.values()) for name in _COUNTS}
        return {"seed": arguments.seed, "trials_sha256": trials_sha256, **counts, "kinds": kinds}

    def told(found: dict[str, Faults]) -> None:
        if arguments.record:  # a run that is cut off leaves what it has
            record("faults", content(found))

    faults = run_trials(
        counts, arguments.images.absolute(), arguments.seed, jobs=arguments.jobs, earlier=earlier, told=told
    )
    if arguments.record:
        publish("faults", content(faults), arguments.json)
    else:
        print(json.dumps(content(faults), indent=None if arguments.json else 2))


if __name__ == "__main__":
    main()
