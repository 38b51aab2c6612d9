"""What checkpoints cost a training: for how long it waits for each, and its speed with them against without.

Llama 3's 8B shapes with Adam on all GPUs of one host (FSDP2, bf16, one sequence of 8,192 tokens on each; cards of less
than 100 GiB recompute blocks, as what backward needs has no room), a checkpoint of 96 GB every 80 steps (`--every`),
written beside the training. One run: each window from one save to the next gives one figure; steps without are those
before the first save, and of each window those after its checkpoint is whole.
`--folder /dev/shm` writes to memory, where the disk is slower than a window is long: it holds two of them.

Goals: it waits at most 0.3 s; 0.99 of the tokens/s.
"""

import argparse
import json
import tempfile
from pathlib import Path
from shutil import disk_usage
from statistics import median
from tempfile import gettempdir
from typing import Any

import numpy as np
import tomli_w
import torch
from record import Figure, add_device, of_ranks, publish, record_so_far
from training import Records, of_event, train_until

_MOST_SECONDS = 500.0
_CHECKPOINT_BYTES = 97 * 10**9
"""Of 32 layers."""

_KEEPS_BYTES = 100 * 2**30
"""Of a card, from which on blocks keep what backward needs: a quarter of the state is 30 GiB, that some 45."""


def _least_memory_bytes() -> int:
    return min(torch.cuda.get_device_properties(card).total_memory for card in range(torch.cuda.device_count()))


class Sizes:
    """What is trained: large on GPUs, tiny without."""

    def __init__(self, device: str, layers: int, every: int) -> None:
        tiny = device == "cpu"
        self.device = device
        self.ranks = 2 if tiny else torch.cuda.device_count()
        self.context, self.vocabulary = (32, 64) if tiny else (8192, 128_256)
        self.layers, self.arguments = layers, {"layers": layers}
        if tiny:
            self.arguments = {"layers": 2, "width": 64, "heads": 2, "kv_heads": 2, "hidden": 64}
        self.activations = "keep" if tiny or _least_memory_bytes() > _KEEPS_BYTES else "blocks"
        self.warm, self.every, self.saves = (4, 8, 3) if tiny else (15, every, 3)

    @property
    def steps(self) -> int:
        """Until the last window ends."""
        return self.every * (self.saves + 1)


def job_of(sizes: Sizes, folder: Path) -> dict[str, Any]:
    count = (sizes.steps + 20) * sizes.ranks * sizes.context + 1
    tokens = np.random.default_rng(0).integers(0, sizes.vocabulary, count)
    np.save(folder / "tokens.npy", tokens.astype(np.uint32 if sizes.vocabulary > 2**16 else np.uint16))
    return {
        "device": sizes.device,
        "parallel": "fsdp",
        "precision": "bf16" if sizes.device == "cuda" else "fp32",
        "task": {"name": "tokens", "context": sizes.context, "vocabulary": sizes.vocabulary},
        "data": {"train": str(folder / "tokens.npy"), "batch_size": sizes.ranks, "last_batch": "drop"},
        "model": {"name": "llama-3-8b", "arguments": sizes.arguments},
        "train": {"epochs": 1},
        "optimizer": {"name": "adamw", "learning_rate": 1e-5},
        "speed": {"compile": "blocks" if sizes.device == "cuda" else False, "activations": sizes.activations},
        "ranks": {"processes": sizes.ranks, "restarts": 0},
        "checkpoint": {"every": f"{sizes.every} steps", "keep": 1, "background": True},
        "log": {"every": 1, "tensorboard": False},
        "run": {"dir": str(folder / "run")},
    }


def content(sizes: Sizes, records: Records) -> dict[str, Any]:
    """Figures of the windows that are whole."""
    times = {one["step"]: float(one["time"]) for one in of_event(records, "step")}
    saves = [one for one in of_event(records, "checkpoint") if one["step"] < sizes.steps]
    edges = [sizes.every * number for number in range(1, sizes.saves + 2) if sizes.every * number in times]
    without = steps_without(sizes, times, saves)
    windows = [times[edge + sizes.every] - times[edge] for edge in edges if edge + sizes.every in times]
    # A save reads all losses there are, so that on a GPU the step after it has none to tell.
    waits = [times[edge + 2] - times[edge] - 2 * median(without) for edge in edges if edge + 2 in times]
    figures = {
        "step_without": (without, "s"),
        "stall": ([one["stalled_seconds"] for one in saves], "s"),
        "stall_by_the_clock": (waits, "s"),
        "until_whole": ([one["seconds"] for one in saves], "s"),
        "speed_with_saves": (
            [sum(without) / len(without) * sizes.every / window for window in windows],
            "of the speed without",
        ),
    }
    return {
        "ranks": sizes.ranks,
        "layers": sizes.arguments["layers"],
        "every": sizes.every,
        "activations": sizes.activations,
        "goals": {"stall": 0.3, "speed_with_saves": 0.99},
        **{name: vars(Figure.of(values, unit)) for name, (values, unit) in figures.items() if values},
    }


def steps_without(sizes: Sizes, times: dict[int, float], saves: Records) -> list[float]:
    """Seconds of steps while nothing is saved: before the first save, and once each is whole."""
    whole = [float(save["time"]) for save in saves]
    quiet = list(range(sizes.warm, sizes.every))
    for number, since in enumerate(whole, 1):
        window = range(sizes.every * number + 2, sizes.every * (number + 1))
        quiet += [step for step in window if times.get(step, 0.0) > since]
    return [times[step + 1] - times[step] for step in quiet if step in times and step + 1 in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_device(parser)
    parser.add_argument(
        "--layers", type=int, default=32, help="of 32: 16 on two GPUs are as much for each as 32 on four"
    )
    parser.add_argument(
        "--every",
        type=int,
        help="steps between saves, 80 of 32 layers; they must take longer than one takes to be written",
    )
    parser.add_argument("--folder", type=Path, help="where the run is; it does not stay")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    sizes = Sizes(arguments.device, arguments.layers, arguments.every or 80 * 32 // arguments.layers)
    if arguments.folder and not arguments.folder.is_dir():
        parser.error(f"--folder {arguments.folder} is not there")
    room, needed = disk_usage(arguments.folder or gettempdir()).free, 2 * _CHECKPOINT_BYTES * sizes.layers // 32
    if sizes.device == "cuda" and room < needed:
        parser.error(f"--folder has room for {room / 1e9:.0f} GB, and two checkpoints take {needed / 1e9:.0f}")
    seen: list[int] = []

    def enough(records: Records) -> bool:
        last = max((one["step"] for one in of_event(records, "step")), default=0)
        if last // sizes.every > len(seen):  # another window is whole
            seen.append(last)
            record_so_far(of_ranks("checkpoint_stall", sizes.ranks), content(sizes, records), sizes.device)
        return bool(last >= sizes.steps)

    with tempfile.TemporaryDirectory(dir=arguments.folder, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        file = folder / "job.toml"
        file.write_text(tomli_w.dumps(job_of(sizes, folder)))
        records = train_until(file, folder / "run" / "metrics.jsonl", enough, _MOST_SECONDS)
    if sizes.device == "cuda":
        publish(of_ranks("checkpoint_stall", sizes.ranks), content(sizes, records), arguments.json)
    else:
        print(json.dumps(content(sizes, records)))


if __name__ == "__main__":
    main()
