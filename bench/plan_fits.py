"""Whether what `hotloop plan` says fits does fit, just below a card's memory; and how much more would have.

A process that holds the rest of a large card's memory makes it a small one: 24 GiB, say, of which the training's own
context and libraries take their part, too. Each case takes the largest batch that the plan gives for such a card, and
trains some steps with it as `hotloop train` sets it up; then with more, until it no longer fits. Goal: all fit.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from plan_accuracy import Case, batch_of, job_of, tiny
from record import add_device, of_this_source, record

from hotloop.core.environment import for_training
from hotloop.core.machine import read_machine

GIB = 2**30
STEPS = 8
CASES = (
    (Case("resnet152", 8, "tf32", compiled=False), 24),
    (Case("vit_base_patch16_224", 8, compiled=False), 16),
    (Case("resnet50", 8), 24),
    (Case("gpt2", 4, context=1024, compiled=False), 40),
    (Case("gpt2", 4, context=1024), 24),
    (Case("llama-3.2-1b", 1, context=4096, vocabulary=128256, activations="blocks"), 40),
    (Case("vit_base_patch16_224", 8), 48),
)
MORE, LESS = (1.1,), (0.95, 0.9, 0.8)
"""Times the largest batch: where it fits, and where it does not."""


@contextmanager
def held(gib: float, device: str) -> Iterator[None]:
    """All of the card's memory but so much is taken by another process."""
    if device == "cpu":
        yield
        return
    holder = [sys.executable, __file__, "--hold", str(gib)]
    with subprocess.Popen(holder, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdin
        process.stdout.readline()
        try:
            yield
        finally:
            process.stdin.close()


def hold(gib: float) -> None:
    """What that process does."""
    import torch

    torch.zeros(1, device="cuda")
    free, _ = torch.cuda.mem_get_info()
    taken = torch.empty(free - int(gib * GIB), dtype=torch.uint8, device="cuda")
    print(taken.numel(), flush=True)
    sys.stdin.read()


def train(case: Case, device: str, folder: Path) -> None:
    """Some steps; prints what they took."""
    import torch

    from hotloop.train.prepare import prepare

    notices: list[str] = []
    ready = prepare(job_of(case, folder, device), read_machine(), notices.append)
    batch = batch_of(ready, case, device, 1)
    for _ in range(STEPS):
        ready.step.run(batch)
    if split := [text for text in notices if "out of memory" in text]:  # recovered from, but it did not fit
        sys.exit(split[0])
    told = {}
    if device == "cuda":
        torch.cuda.synchronize()
        told = {
            "allocated_gib": torch.cuda.max_memory_allocated() / GIB,
            "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
            "left_gib": torch.cuda.mem_get_info()[0] / GIB,
            "kept_gib": torch.cuda.memory_reserved() / GIB,
        }
    print(json.dumps(told))


def largest(case: Case, gib: float, card: str) -> tuple[int, dict[str, float]]:
    """By the plan, and its memory by part, GiB."""
    from hotloop.plan.cards import card_named
    from hotloop.plan.planning import Request, plan_job

    small = replace(card_named(card), memory_bytes=int(gib * GIB))

    def planned(batch: int) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            job = job_of(replace(case, batch=batch), Path(folder)).model_copy(update={"device": "auto"})
            return plan_job(job, Request(small, samples=100_000), lambda text: None)

    most = planned(case.batch).largest_batch
    memory = planned(most).asked.setup.memory
    return most, {name: value / GIB for name, value in memory.parts.items()}


def tried(case: Case, gib: float, device: str) -> dict[str, Any] | None:
    """What a training with the case's batch told; None where memory did not suffice."""
    with tempfile.TemporaryDirectory() as folder, held(gib, device):
        asked = json.dumps({name: getattr(case, name) for name in case.__dataclass_fields__})
        script = [sys.executable, __file__, "--train", asked, "--device", device, "--folder", folder]
        done = subprocess.run(
            script, capture_output=True, text=True, timeout=300, check=False, env=for_training(os.environ)
        )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        if not any(word in done.stderr for word in ("out of memory", "OutOfMemory", "ALLOC_FAILED")):
            sys.exit(f"{case.name}: {last}")
        print(f"{case.name} in {gib} GiB: {last}", file=sys.stderr, flush=True)
        return None
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_device(parser)
    here = next((gpu.name for gpu in read_machine().gpus), "H200")
    parser.add_argument("--card", default=here)
    parser.add_argument("--hold", type=float, help="what a process of this bench does")
    parser.add_argument("--train", type=json.loads, help="what a process of this bench does")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases with this in their names")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.hold:
        hold(options.hold)
        return
    if options.train:
        train(Case(**options.train), options.device, options.folder)
        return
    cases: dict[str, Any] = of_this_source("plan_fits").get("cases", {})
    for case, gib in CASES:
        if options.only not in case.name:
            continue
        most, parts = largest(case, gib, options.card)
        chosen = replace(case, batch=most)
        runs: dict[str, Any] = {}

        def fits(factor: float, chosen: Case = chosen, gib: float = gib, runs: dict[str, Any] = runs) -> bool:
            one = replace(chosen, batch=math.ceil(factor * chosen.batch))
            runs[str(one.batch)] = tried(tiny(one) if options.device == "cpu" else one, gib, options.device)
            return runs[str(one.batch)] is not None

        if fits(1.0):
            all(map(fits, MORE))
        else:
            any(map(fits, LESS))
        named = f"{chosen.name}, {gib} GiB"
        cases[named] = {"batch": most, "fits": runs[str(most)] is not None, "planned_gib": parts, "runs": runs}
        print(f"{named}: {json.dumps(cases[named])}", file=sys.stderr, flush=True)
        wrong = sum(not one["fits"] for one in cases.values())
        content: dict[str, Any] = {"goals": {"wrong": 0}, "n": len(cases), "wrong": wrong, "cases": cases}
        if options.device == "cuda":
            record("plan_fits", content)
    print(json.dumps(content, indent=None if options.json else 2))


if __name__ == "__main__":
    main()
