"""The demo's epoch: hotloop's whole loop against a plain PyTorch loop over a DataLoader, on this machine's CPU.

Same files, model, augmentation, optimizer and batch size. The plain loop has what one writes: ImageFolder,
torchvision transforms, a DataLoader (0, 1 and 2 workers, persistent; the best counts), the loss printed now and then.
hotloop is the command `hotloop train`, wall time from epoch to epoch: logging, TensorBoard and checkpoints included.
Each is a process of its own, and they take turns, so that a drift of the machine meets all.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from record import Figure, publish

IMAGES = Path(__file__).parents[1] / "examples/digits/images"
JOB = IMAGES.parent / "job.toml"


def hotloop_epochs(epochs: int) -> list[float]:
    """Seconds of each epoch after the first, of the command that a user types."""
    from hotloop.core.job_file import load_job

    with tempfile.TemporaryDirectory() as folder:
        settings = {"train.epochs": epochs + 1, "run.dir": f"{folder}/run", "data.train": IMAGES / "train"}
        job = load_job(JOB, [f"{key}={value}" for key, value in settings.items()])
        job = job.model_copy(update={"data": job.data.model_copy(update={"val": None})})
        Path(folder, "job.toml").write_text(job.to_toml())
        command = [sys.executable, "-m", "hotloop", "train", f"{folder}/job.toml"]
        subprocess.run(command, check=True, capture_output=True, timeout=600)
        records = [json.loads(line) for line in Path(folder, "run/metrics.jsonl").read_text().splitlines()]
    ends = [record["time"] for record in records if record["event"] == "epoch"]
    return [after - before for before, after in pairwise(ends)]


def plain_epochs(epochs: int, workers: int) -> list[float]:
    """Seconds of each epoch after the first, of the loop that one writes by hand."""
    import timm
    import torch
    from torchvision import datasets
    from torchvision.transforms import v2

    from hotloop.core.job_file import load_job

    job = load_job(JOB)
    settings = job.task
    torch.manual_seed(0)
    transform = v2.Compose(
        [
            v2.RandomResizedCrop(
                settings.image_size, settings.augment.crop_scale, settings.augment.crop_ratio, antialias=True
            ),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(settings.mean, settings.std),
        ]
    )
    loader = torch.utils.data.DataLoader(
        datasets.ImageFolder(str(IMAGES / "train"), transform),
        job.data.batch_size,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    model = timm.create_model(job.model.name, num_classes=10)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.01, weight_decay=job.optimizer.weight_decay, momentum=0.9, nesterov=True
    )
    criterion = torch.nn.CrossEntropyLoss()
    ends = []
    for _ in range(epochs + 1):
        for number, (images, labels) in enumerate(loader):
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
            if number % 10 == 0:
                loss.item()
        ends.append(time.perf_counter())
    return [after - before for before, after in pairwise(ends)]


LOOPS: dict[str, Callable[[int], list[float]]] = {
    "hotloop": hotloop_epochs,
    "plain, 0 workers": partial(plain_epochs, workers=0),
    "plain, 1 worker": partial(plain_epochs, workers=1),
    "plain, 2 workers": partial(plain_epochs, workers=2),
}


def in_child(loop: str, epochs: int) -> list[float]:
    """A loop's times, taken in a fresh process."""
    command = [sys.executable, __file__, "--loop", loop, "--epochs", str(epochs)]
    finished = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    seconds: list[float] = json.loads(finished.stdout.splitlines()[-1])
    return seconds


def measure(rounds: int, epochs: int) -> dict[str, Any]:
    """All loops in turn, `rounds` times."""
    seconds: dict[str, list[float]] = {loop: [] for loop in LOOPS}
    for _ in range(rounds):
        for loop in LOOPS:
            seconds[loop] += in_child(loop, epochs)
    figures = {name: Figure.of(values, "s an epoch") for name, values in seconds.items()}
    best = min((name for name in figures if name != "hotloop"), key=lambda name: figures[name].median)
    return {
        "epoch_seconds": {name: asdict(figure) for name, figure in figures.items()},
        "best_rival": best,
        "ratio": figures["hotloop"].median / figures[best].median,
        "goal": "ratio <= 1.0",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=3, help="timed epochs a round, after one that warms up")
    parser.add_argument("--loop", choices=LOOPS, help="time this one here and print its seconds")
    arguments = parser.parse_args()
    if arguments.loop:
        print(json.dumps(LOOPS[arguments.loop](arguments.epochs)))
    else:
        publish("demo_epoch", measure(arguments.rounds, arguments.epochs), arguments.json)


if __name__ == "__main__":
    main()
