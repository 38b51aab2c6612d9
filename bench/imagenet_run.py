"""`hotloop run` on pytorch/examples' imagenet/main.py, unmodified: ResNet-50 from JPEG files, default arguments.

The script is not part of this repository: https://github.com/pytorch/examples/tree/main/imagenet. It is timed by the
lines that it prints, as it is, with its first batch kept on the GPU (a copy of it with one line changed), and under
`hotloop run` at both levels. Goals: exact at least 0.95 of the speed with the batch on the GPU; fast at least 4 times
the plain speed.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from record import Figure, publish

LOOP = "for i, (images, target) in enumerate(train_loader):"
CACHED = """import itertools
    kept = [tensor.to(device) for tensor in next(iter(train_loader))]
    for i, (images, target) in enumerate(itertools.repeat(kept, len(train_loader))):"""


def seconds(command: list[str], first: int, last: int) -> float:
    """A step's, between the lines of two steps; then the script is ended."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout
        started = begun = None
        for line in child.stdout:
            found = re.match(r"Epoch: \[0\]\[ *(\d+)/", line)
            if not found:
                continue
            step, now = int(found[1]), time.perf_counter()
            if started is None and step >= first:
                started, begun = now, step
            if started is not None and step >= last:
                child.terminate()
                child.wait(60)
                return (now - started) / (step - (begun or 0))
    raise RuntimeError(f"{command} ended before step {last}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", type=Path, help="examples/imagenet/main.py")
    parser.add_argument("data", type=Path, help="a folder with train/ and val/")
    parser.add_argument("--options", default="", help="of the script, in one string")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, nargs=2, default=(40, 140), help="between which a plain script is timed")
    parser.add_argument("--after", type=int, default=600, help="steps in which accelerations are switched on and timed")
    arguments = parser.parse_args()
    options = [str(arguments.data), "-p", "10", *arguments.options.split()]
    text = arguments.script.read_text()
    assert text.count(LOOP) == 1, "the script is another one than this bench knows"
    with tempfile.TemporaryDirectory() as folder:
        cached = Path(folder) / "cached.py"
        cached.write_text(text.replace(LOOP, CACHED))
        first, last = arguments.steps
        late = (arguments.after + first, arguments.after + last)
        plain = [sys.executable, str(arguments.script), *options]
        under = [sys.executable, "-m", "hotloop", "run"]
        commands = {
            "plain": (plain, first, last),
            "cached": ([sys.executable, str(cached), *options], first, last),
            "exact": ([*under, "--", *plain], *late),
            "fast": ([*under, "--level", "fast", "--", *plain], *late),
        }
        times: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(arguments.rounds):
            for name, (command, begin, end) in commands.items():
                times[name].append(seconds(command, begin, end))
                print(f"{name}: {times[name][-1]:.4f} s", file=sys.stderr, flush=True)
    figures = {name: Figure.of(found, "s") for name, found in times.items()}
    content = {
        "goals": {"exact_of_cached": 0.95, "fast_over_plain": 4.0},
        "exact_of_cached": figures["cached"].median / figures["exact"].median,
        "exact_over_plain": figures["plain"].median / figures["exact"].median,
        "fast_over_plain": figures["plain"].median / figures["fast"].median,
        "step_seconds": {name: asdict(figure) for name, figure in figures.items()},
    }
    publish("imagenet_run", content, arguments.json)


if __name__ == "__main__":
    main()
