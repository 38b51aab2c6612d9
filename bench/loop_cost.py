"""What a training loop costs beside its kernels: a small MLP, batch 64, data on the GPU, steps per second.

hotloop trains through the whole `train` loop: shuffling, schedule, metrics, TensorBoard, checkpoints. Rivals iterate
over batches that lie ready on the GPU, and do nothing besides. The goals: at least 0.95 of a hand-captured CUDA graph,
10 × raw eager PyTorch, 15 × Lightning, 12 × Accelerate. Rounds alternate; a figure is steps/s of one pass.
"""

import argparse
import json
import logging
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from contenders import captured, synchronize
from record import Figure, add_device, publish
from torch import Tensor, nn
from torch.nn import functional

import hotloop
from hotloop.core.job_file import parse_job
from hotloop.train.observer import Observer

BATCH, WIDTH, CLASSES = 64, 256, 10
GOALS = {"raw graph": 0.95, "raw eager": 10.0, "lightning": 15.0, "accelerate": 12.0}
Batches = list[tuple[Tensor, Tensor]]


def mlp() -> nn.Module:
    layers = [nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES)]
    return nn.Sequential(*layers)


class Points(hotloop.Task):
    """The same network and loss as a task."""

    def __init__(self, job: hotloop.Job, steps: int) -> None:
        super().__init__(job)
        random = np.random.default_rng(0)
        inputs = random.standard_normal((steps * BATCH, WIDTH), dtype=np.float32)
        self.points = hotloop.ArrayDataset({"inputs": inputs, "targets": random.integers(0, CLASSES, steps * BATCH)})

    def data(self, split: str) -> hotloop.Dataset | None:
        return self.points if split == "train" else None

    def model(self) -> nn.Module:
        return mlp()

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return functional.cross_entropy(outputs, batch["targets"])


def ours(steps: int, device: str, compiled: bool, rounds: int) -> list[float]:
    """Steps/s of each epoch but the first, in which the step is captured."""
    with tempfile.TemporaryDirectory() as folder:
        raw = {
            "task": {"name": "loop_cost:Points", "arguments": {"steps": steps}},
            "data": {"train": "made by the task", "batch_size": BATCH},
            "model": {"name": "made by the task"},
            "train": {"epochs": rounds + 1},
            "optimizer": {"name": "adamw", "learning_rate": 1e-4, "weight_decay": 0.01, "decay_vectors": True},
            "schedule": {"name": "cosine"},
            "speed": {"compile": compiled},
            "device": device,
            "precision": "fp32",
            "run": {"dir": folder + "/run"},
        }
        run, _ = hotloop.train_job(parse_job(raw, "bench"), hotloop.read_machine(), Observer())
        epochs = [record for record in run.metrics() if record["event"] == "epoch"]
        return [record["samples_per_second"] / BATCH for record in epochs[1:]]


def raw_eager(batches: Batches, device: str) -> Callable[[], None]:
    model = mlp().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def one_pass() -> None:
        for inputs, targets in batches:
            optimizer.zero_grad(set_to_none=True)
            functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        synchronize(device)

    return one_pass


def raw_graph(batches: Batches, device: str) -> Callable[[], None]:
    model = mlp().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, capturable=True, fused=True)
    inputs, targets = (tensor.clone() for tensor in batches[0])

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    graph = captured(step, 3)
    kept = step  # and all that it uses: the graph knows addresses only

    def one_pass() -> None:
        assert kept
        for given_inputs, given_targets in batches:
            inputs.copy_(given_inputs)
            targets.copy_(given_targets)
            graph.replay()
        synchronize(device)

    return one_pass


def accelerate(batches: Batches, device: str) -> Callable[[], None]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=device == "cpu")
    model = mlp()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))

    def one_pass() -> None:
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
        synchronize(device)

    return one_pass


def lightning(batches: Batches, device: str) -> Callable[[], None]:
    import lightning as rival

    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)

    class Module(rival.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = mlp()

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            return functional.cross_entropy(self.network(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    module = Module()
    loader = torch.utils.data.DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }

    def one_pass() -> None:
        trainer = rival.Trainer(max_epochs=1, accelerator="gpu" if device == "cuda" else "cpu", devices=1, **quiet)
        trainer.fit(module, loader)
        synchronize(device)

    return one_pass


RIVALS = {"raw eager": raw_eager, "raw graph": raw_graph, "accelerate": accelerate, "lightning": lightning}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=3000, help="steps a pass")
    parser.add_argument("--rounds", type=int, default=7)
    add_device(parser)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    steps, rounds, device = arguments.steps, arguments.rounds, arguments.device
    inputs = torch.randn(steps, BATCH, WIDTH, device=device)
    targets = torch.randint(0, CLASSES, (steps, BATCH), device=device)
    batches = list(zip(inputs.unbind(), targets.unbind(), strict=True))
    skipped = {name: "not installed" for name in ("accelerate", "lightning") if find_spec(name) is None}
    if device == "cpu":
        skipped["raw graph"] = "there are no CUDA graphs on a CPU"
    passes = {name: make(batches, device) for name, make in RIVALS.items() if name not in skipped}
    speeds: dict[str, list[float]] = {name: [] for name in passes}
    for one_pass in passes.values():
        one_pass()
    for _ in range(rounds):
        for name, one_pass in passes.items():
            started = time.perf_counter()
            one_pass()
            speeds[name].append(steps / (time.perf_counter() - started))
    speeds["hotloop"] = ours(steps, device, False, rounds)
    if device == "cuda":
        speeds["hotloop, compiled"] = ours(steps, device, True, rounds)
    figures = {name: Figure.of(values, "steps/s") for name, values in speeds.items()}
    best = "hotloop, compiled" if device == "cuda" else "hotloop"
    content = {
        "steps_per_second": {name: asdict(figure) for name, figure in figures.items()},
        "ratios": {name: figures[best].median / figures[name].median for name in passes},
        "ratios_uncompiled": {name: figures["hotloop"].median / figures[name].median for name in passes},
        "goals": GOALS,
        "skipped": skipped,
    }
    if device == "cuda":
        publish("loop_cost", content, arguments.json)
    else:
        print(json.dumps(content))


if __name__ == "__main__":
    main()
