"""`hotloop run` on pytorch/examples' imagenet/main.py, unmodified: ResNet-50 from JPEG files, default arguments.

The script is not part of this repository: https://github.com/pytorch/examples/tree/main/imagenet. It is timed by the
lines that it prints, as it is, with its first batch kept on the GPU (a copy of it with one line changed), and under
`hotloop run` at both levels. Goals: exact at least 0.95 of the speed with the batch on the GPU; fast at least 4 times
the plain speed.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from photographs import make_photographs
from record import Figure, add_device, of_this_source, publish, record

_PHOTOGRAPHS, _LINKS = 8192, 48
"""Distinct files, and names of each: an epoch of 1,536 steps, as accelerations are tried within one. The links of a
file share its place in memory: of few files the disk would be read but once.
"""

LOOP = "for i, (images, target) in enumerate(train_loader):"
CACHED = """import itertools
    kept = [tensor.to(device) for tensor in next(iter(train_loader))]
    for i, (images, target) in enumerate(itertools.repeat(kept, len(train_loader))):"""


def seconds(command: list[str], first: int, last: int) -> float:
    """A step's, between the lines of two steps; then the script is ended."""
    begin: tuple[int, float] | None = None
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    ) as child:
        assert child.stdout
        for line in child.stdout:
            found = re.match(r"Epoch: \[0\]\[ *(\d+)/", line)
            if not found:
                continue
            step, now = int(found[1]), time.perf_counter()
            if not begin and step >= first:
                begin = step, now
            if begin and step >= last and step > begin[0]:
                child.terminate()
                child.wait(60)
                return (now - begin[1]) / (step - begin[0])
    raise RuntimeError(f"{command} ended before step {last}")


def make_data(folder: Path, count: int, links: int) -> None:
    """Distinct photographs, each under several names, in the folders that the script wants."""
    originals = folder / "originals"
    make_photographs(originals, count)
    for file in originals.glob("*/*.jpg"):
        for part, names in (("train", range(links)), ("val", range(1))):
            target = folder / part / file.parent.name
            target.mkdir(parents=True, exist_ok=True)
            for name in names:
                os.link(file, target / f"{name}_{file.name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", type=Path, help="examples/imagenet/main.py")
    parser.add_argument("--data", type=Path, help="a folder with train/ and val/  [default: photographs are made]")
    parser.add_argument("--photographs", type=int, default=_PHOTOGRAPHS, help="distinct ones, if they are made")
    parser.add_argument("--links", type=int, default=_LINKS, help="names of each, so many make an epoch long enough")
    parser.add_argument("--options", default="", help="of the script, in one string")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--add", action="store_true", help="to the figures that are recorded, of the same source")
    add_device(parser)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, nargs=2, default=(20, 120), help="between which a plain script is timed")
    parser.add_argument(
        "--after", type=int, nargs=2, default=(700, 1200), metavar=("EXACT", "FAST"),
        help="steps in which accelerations are switched on and timed: `run` is read after these",
    )  # fmt: skip
    arguments = parser.parse_args()
    text = arguments.script.read_text()
    assert text.count(LOOP) == 1, "the script is another one than this bench knows"
    with tempfile.TemporaryDirectory() as folder:
        if not arguments.data:
            make_data(Path(folder), arguments.photographs, arguments.links)
        options = [str(arguments.data or folder), "-a", "resnet50", "-p", "10", *arguments.options.split()]
        cached, summary = Path(folder) / "cached.py", Path(folder) / "summary.json"
        cached.write_text(text.replace(LOOP, CACHED))
        first, last = arguments.steps
        late = [(after + first, after + last) for after in arguments.after]
        plain = [sys.executable, str(arguments.script), *options]
        under = [sys.executable, "-m", "hotloop", "run", "--json-summary", str(summary)]
        commands = {
            "plain": (plain, first, last),
            "cached": ([sys.executable, str(cached), *options], first, last),
            "exact": ([*under, "--", *plain], *late[0]),
            "fast": ([*under, "--level", "fast", "--", *plain], *late[1]),
        }
        known = of_this_source("imagenet_run") if arguments.add else {}
        times = known.get("seconds") or {name: [] for name in commands}
        told: dict[str, list[Any]] = known.get("summaries") or {"exact": [], "fast": []}
        for _ in range(arguments.rounds):
            for name, (command, begin, end) in commands.items():
                times[name].append(seconds(command, begin, end))
                print(f"{name}: {times[name][-1]:.4f} s", file=sys.stderr, flush=True)
                if name in ("exact", "fast"):
                    told[name].append(json.loads(summary.read_text()))
                if arguments.device == "cuda":
                    record("imagenet_run", content(times, told))  # a run that is cut off leaves what it has
    if arguments.device == "cuda":
        publish("imagenet_run", content(times, told), arguments.json)
    else:
        print(json.dumps(content(times, told)))


def content(times: dict[str, list[float]], told: dict[str, list[Any]]) -> dict[str, Any]:
    """Figures and ratios of what has been timed so far."""
    figures = {name: Figure.of(found, "s") for name, found in times.items() if found}
    pairs = {
        "exact_of_cached": ("cached", "exact"), "exact_over_plain": ("plain", "exact"),
        "fast_over_plain": ("plain", "fast"),
    }  # fmt: skip
    ratios = {
        name: figures[slow].median / figures[quick].median
        for name, (slow, quick) in pairs.items()
        if slow in figures and quick in figures
    }
    return {
        "goals": {"exact_of_cached": 0.95, "fast_over_plain": 4.0},
        **ratios,
        "step_seconds": {name: asdict(figure) for name, figure in figures.items()},
        "summaries": told,
        "seconds": times,
    }


if __name__ == "__main__":
    main()
