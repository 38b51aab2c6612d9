"""The main job on a GPU: the same results as on the CPU within rounding, and nothing that only a GPU can get wrong."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pictures import write_image
from torch import Tensor, nn
from torch.nn import functional

from hotloop import HotloopError, Step, StepSettings, train_job
from hotloop.core.job import Job, parse_job
from hotloop.core.machine import read_machine
from hotloop.core.run import Result
from hotloop.train.counter import Counter
from hotloop.train.loss_ring import LossRing
from hotloop.train.observer import Event, Logged, Observer
from hotloop.train.resolve import apply_settings, resolve

Make = Callable[..., Path]


class Told(Observer):
    def __init__(self) -> None:
        self.logged: list[Logged] = []

    def on(self, event: Event) -> None:
        if isinstance(event, Logged):
            self.logged.append(event)


def small(folder: Path, run_dir: Path, **keys: Any) -> Job:
    raw: dict[str, Any] = {
        "task": {"image_size": 16, "augment": {"crop_scale": [0.5, 1.0]}},
        "data": {"train": str(folder), "val": str(folder), "batch_size": 4, "workers": 2},
        "model": {"name": "tiny:cnn"},
        "train": {"epochs": 10},
        "optimizer": {"learning_rate": 0.05},
        "log": {"every": 3, "tensorboard": False},
        "run": {"dir": str(run_dir)},
        **keys,
    }
    return parse_job(raw, "job")


def run(job: Job, observer: Observer | None = None) -> Result:
    return train_job(job, read_machine(), observer or Told())[1]


@pytest.mark.parametrize("precision", ["auto", "fp32", "tf32", "bf16", "fp16"])
def test_each_precision_learns(make_images: Make, tmp_path: Path, precision: str) -> None:
    told = Told()
    result = run(small(make_images(), tmp_path / "run", precision=precision, train={"epochs": 25}), told)
    assert result.metrics["val_accuracy"] == 1.0
    assert result.device == "cuda"
    assert result.precision == ("bf16" if precision == "auto" else precision)
    assert told.logged[-1].memory_bytes > 0
    assert told.logged[-1].progress.whole.steps == 100, "every loss arrived"


def test_strict_fp32_agrees_with_the_cpu(make_images: Make, tmp_path: Path) -> None:
    folder = make_images()
    ends = [
        run(small(folder, tmp_path / device, device=device, precision="fp32", train={"epochs": 3}))
        for device in ("cpu", "cuda")
    ]
    assert ends[1].metrics["train_loss"] == pytest.approx(ends[0].metrics["train_loss"], rel=1e-3)
    assert ends[1].metrics["val_loss"] == pytest.approx(ends[0].metrics["val_loss"], rel=1e-3)


@pytest.mark.parametrize(("precision", "low", "high"), [("fp32", 0.0, 1e-6), ("tf32", 1e-5, 2e-3)])
def test_precision_switches_reach_the_matrix_units(
    make_images: Make, tmp_path: Path, precision: str, low: float, high: float
) -> None:
    apply_settings(resolve(small(make_images(), tmp_path / "run", precision=precision), read_machine())[0])
    torch.manual_seed(0)
    a, b = torch.randn(2, 512, 512, dtype=torch.float64, device="cuda")
    error = ((a.float() @ b.float()).double() - a @ b).norm() / (a @ b).norm()
    assert low <= error.item() < high


def test_a_stopped_run_continues(make_images: Make, tmp_path: Path) -> None:
    """Bits may differ on a GPU, where some sums have no order; the run must agree within rounding."""
    folder = make_images()
    through = run(small(folder, tmp_path / "a", precision="fp32"))
    first = run(small(folder, tmp_path / "b", precision="fp32", train={"epochs": 4}))
    second = run(small(folder, tmp_path / "b", precision="fp32", schedule={"name": "constant"}))
    assert (first.steps, second.steps, through.steps) == (16, 40, 40)
    assert second.metrics["val_accuracy"] == through.metrics["val_accuracy"]


def test_losses_arrive_one_window_later_and_all_when_waited_for() -> None:
    counter = Counter(torch.device("cuda"))
    ring = LossRing(counter, torch.device("cuda"))

    def write(value: float) -> None:
        ring.write(torch.tensor(value, device="cuda"))
        counter.advance()
        counter.advanced()
        ring.written()

    for number in range(3):
        write(float(number))
    assert ring.take() == []
    write(3.0)
    assert ring.take(wait=True) == [0.0, 1.0, 2.0, 3.0]
    assert ring.take(wait=True) == []


def test_a_loss_that_is_not_a_number_is_found(make_images: Make, tmp_path: Path) -> None:
    with pytest.raises(HotloopError, match="the loss of step 1 is nan"):
        run(small(make_images(), tmp_path / "run", model={"name": "tiny:exploding"}))


def test_a_step_on_the_gpu_is_the_step_on_the_cpu() -> None:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    torch.backends.fp32_precision = "ieee"
    ends = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(192, 2)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step = Step(model, loss, optimizer, settings=StepSettings(clip_norm=1.0, ema=0.9))
        for number in range(5):
            random = torch.Generator().manual_seed(number)
            images = torch.randn(8, 3, 8, 8, generator=random).to(device)
            step((images, torch.arange(8, device=device) % 2))
        assert step.averaged is not None
        ends.append(torch.cat([parameter.detach().cpu().flatten() for parameter in step.averaged.parameters()]))
    assert torch.allclose(ends[0], ends[1], atol=1e-5)


def test_mixed_formats_and_sizes_reach_the_gpu(tmp_path: Path) -> None:
    for label in ("a", "b"):
        for number, suffix in enumerate((".jpg", ".png", ".webp", ".bmp", ".gif")):
            write_image(tmp_path / f"mixed/{label}/{number}{suffix}", number, (60 + number, 40))
    result = run(small(tmp_path / "mixed", tmp_path / "run", task={"image_size": 32, "augment": {"mixup": 0.2}}))
    assert (result.status, result.corrupt_files) == ("finished", [])
