"""Small models and tasks that tests name as "tiny:...". torch is imported when they are built, not before."""

import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import hotloop


def cnn(num_classes: int = 2, dropout: float = 0.0) -> nn.Module:
    """A convolution, normalisation, pooling, a linear layer."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(32, num_classes),
    )


def striped(num_classes: int = 2) -> nn.Module:
    """With weights in channels_last."""
    return cnn(num_classes).to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def perceptron(num_classes: int = 2) -> nn.Module:
    """A linear layer over 16 × 16 pixels: nothing in it looks at other samples."""
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, num_classes))


def wide(num_classes: int = 2) -> nn.Module:
    """With a weight that is large enough for a file of its own."""
    return nn.Sequential(
        nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 100), nn.ReLU(), nn.Linear(100, num_classes)
    )


def broad(num_classes: int = 2) -> nn.Module:
    """3 MB of weights, and next to no time to compute: a run of it is saved often."""
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 1000), nn.ReLU(), nn.Linear(1000, num_classes))


class Block(nn.Module):
    """One of two that share a weight in `tied`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(48), nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.linear(self.norm(x))
        return y


def tied(num_classes: int = 2) -> nn.Module:
    """Blocks with the same weight."""
    first, second = Block(), Block()
    second.linear.weight = first.linear.weight
    return nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), first, second, nn.Linear(48, num_classes))


def doubled(num_classes: int = 2) -> nn.Module:
    """With weights of two types."""
    model = perceptron(num_classes)
    model.register_parameter("scale", nn.Parameter(torch.ones(3, dtype=torch.float64)))
    return model


def turned(num_classes: int = 2) -> nn.Module:
    """With a weight whose rows do not lie one after the other."""
    model = perceptron(num_classes)
    model[1].weight = nn.Parameter(model[1].weight.detach().t().contiguous().t())  # type: ignore[index]
    return model


class HalfDivided(nn.Sequential):
    """Whose `divide` leaves a layer as it is."""

    def __init__(self, num_classes: int = 2) -> None:
        super().__init__(nn.Flatten(), nn.Linear(3 * 16 * 16, 8), nn.ReLU(), nn.Linear(8, num_classes))

    def divide(self, mesh: DeviceMesh) -> None:
        parallelize_module(self[1], mesh, ColwiseParallel(output_layouts=Replicate()))


class Sometimes(nn.Module):
    """From its fourth step on a layer is left out, or before."""

    def __init__(self, before: bool) -> None:
        super().__init__()
        self.first, self.extra, self.steps, self.before = nn.Linear(48, 48), nn.Linear(48, 48), 0, before

    def forward(self, x: Tensor) -> Tensor:
        self.steps += self.training
        y: Tensor = self.first(x)
        return y if (self.steps < 4) == self.before else self.extra(y)


def sometimes(num_classes: int = 2, before: bool = False) -> nn.Module:
    """With weights that get no gradient in later steps, or in the first."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), Sometimes(before), nn.Linear(48, num_classes))


class Idle(nn.Module):
    """Has weights that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.extra = nn.Linear(48, 48), nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.own(x))


def idle(num_classes: int = 2) -> nn.Module:
    """With weights that get no gradient in any step."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), Idle(), nn.Linear(48, num_classes))


class Twice(nn.Linear):
    """Computes twice, each time in a re-entrant checkpoint."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(super().forward, x, use_reentrant=True) if self.training else super().forward(x)
        return x


def twice(num_classes: int = 2) -> nn.Module:
    """With weights whose gradient comes twice in a backward pass."""
    return nn.Sequential(
        nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 48), Twice(48, 48), nn.Linear(48, num_classes)
    )


def exploding(num_classes: int = 2) -> nn.Module:
    """Its loss is NaN from the first step on."""
    model = nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes))
    model(torch.zeros(1, 3, 16, 16))
    with torch.no_grad():
        model[1].weight.fill_(float("nan"))
    return model


def not_a_model(num_classes: int = 2) -> object:
    """What a model must not be."""
    return "a string"


class Line(hotloop.Dataset):
    """y = 2x + 1 with noise drawn from the sample's own random numbers."""

    def __init__(self, samples: int = 40, broken: int = -1, ragged: int = -1, damaged: tuple[int, ...] = ()) -> None:
        self.samples = samples
        self.broken = broken
        self.ragged = ragged
        self.damaged = damaged

    def __len__(self) -> int:
        return self.samples

    def sample(self, index: int, random: np.random.Generator) -> dict[str, np.ndarray]:
        if index == self.broken:
            raise RuntimeError("this sample is broken")
        if index in self.damaged:
            raise hotloop.DamagedSample(f"line {index}", "scratched")
        x = np.full((2 if index == self.ragged else 1,), index / self.samples, dtype=np.float32)
        return {"inputs": x, "targets": 2 * x + 1 + np.float32(0.01 * random.standard_normal())}

    def fingerprint(self) -> str:
        return f"line {self.samples}"


class Regression(hotloop.Task):
    """A task of a user's own: a line through noisy points."""

    def __init__(self, job: hotloop.Job, samples: int = 40, **options: Any) -> None:
        super().__init__(job)
        self.samples = samples
        self.options = options

    def data(self, split: str) -> hotloop.Dataset:
        return Line(self.samples if split == "train" else 10, **self.options)

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return functional.mse_loss(outputs, batch["targets"])


@dataclass
class Answer:
    """What a model returns, of which pytree knows nothing."""

    value: Tensor


class Answering(nn.Linear):
    def forward(self, x: Tensor) -> Answer:  # type: ignore[override]
        return Answer(super().forward(x))


class Wrapped(Regression):
    """Its model returns an object of a class of the user's."""

    def model(self) -> nn.Module:
        return Answering(1, 1)

    def loss(self, outputs: Answer, batch: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        return super().loss(outputs.value, batch)


class Replicated(Regression):
    """Its model is in a DataParallel already."""

    def model(self) -> nn.Module:
        return nn.DataParallel(nn.Linear(1, 1))


class Signed(Regression):
    """Each rank that makes its model with numbers leaves a file; or does not make it."""

    model_on_meta = True

    def __init__(self, job: hotloop.Job, refuses: bool = False, **options: Any) -> None:
        super().__init__(job, **options)
        self.refuses = refuses

    def model(self) -> nn.Module:
        model = nn.Linear(1, 1)
        if not model.weight.is_meta:
            if self.refuses:
                raise RuntimeError("no numbers for this one")
            Path(f"made-by-{os.environ['RANK']}").touch()
        return model


class VectorLoss(Regression):
    """Forgets to take the mean."""

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return (outputs - batch["targets"]).square()


class ByNumbers(Regression):
    """Its loss cannot be known without the numbers themselves."""

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return functional.mse_loss(outputs, batch["targets"]) * batch["targets"].mean().item()


class Rotated(Regression):
    """Prepares by a matrix product, and notes in which precision that and the model's came."""

    prepare_is_pure = True
    prepared: ClassVar[set[torch.dtype]] = set()
    forwarded: ClassVar[set[torch.dtype]] = set()

    def prepare(self, batch: dict[str, Tensor], training: bool) -> dict[str, Tensor]:
        inputs = batch["inputs"] @ torch.ones(1, 1)
        self.prepared.add(inputs.dtype)
        return {**batch, "inputs": inputs}

    def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        outputs: Tensor = model(batch["inputs"])
        self.forwarded.add(outputs.dtype)
        return outputs


class Stuck(Regression):
    """On the second rank the third step does not end."""

    steps = 0
    where: str | None = "1"

    def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        self.steps += model.training
        if self.steps == 3 and os.environ.get("RANK") == self.where:
            stuck()
        outputs: Tensor = model(batch["inputs"])
        return outputs


class StuckAlone(Stuck):
    """The same of one process."""

    where = None


class BrokenOnSecond(Regression):
    """On the second rank the loss of the third step is `broken`."""

    steps = 0

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        self.steps += outputs.requires_grad
        found = super().loss(outputs, batch)
        return self.broken(found) if self.steps == 3 and os.environ.get("RANK") == "1" else found

    def broken(self, loss: Tensor) -> Tensor:
        raise ValueError("a loss of the user's own")


class NanOnSecond(BrokenOnSecond):
    """There it is NaN."""

    def broken(self, loss: Tensor) -> Tensor:
        return loss * float("nan")


class SlowLine(Line):
    """On the second rank a sample takes 20 ms to read."""

    def sample(self, index: int, random: np.random.Generator) -> dict[str, np.ndarray]:
        if os.environ.get("RANK") == "1":
            time.sleep(0.02)
        return super().sample(index, random)


class SlowToRead(Regression):
    """Reads slowly on one rank."""

    def data(self, split: str) -> hotloop.Dataset:
        return SlowLine(self.samples)


class SlowToCompute(Regression):
    """Computes slowly on one rank."""

    def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if model.training and os.environ.get("RANK") == "1":
            time.sleep(0.05)
        outputs: Tensor = model(batch["inputs"])
        return outputs


class OnFewer(Regression):
    """The device of one rank, which a variable names, is gone."""

    def model(self) -> nn.Module:
        if os.environ.get("RANK") == os.environ["GONE"]:
            raise RuntimeError("CUDA error: invalid device ordinal")
        print("ranks see GPUs", os.environ.get("CUDA_VISIBLE_DEVICES"), file=sys.stderr)
        return super().model()


def stuck() -> None:
    """Waits for what never comes."""
    threading.Event().wait()


class Paced(Regression):
    """A step takes as long as it is told to, so that there is time to interrupt a run."""

    def __init__(self, job: hotloop.Job, seconds: float = 0.0, **options: Any) -> None:
        super().__init__(job, **options)
        self.seconds = seconds

    def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        time.sleep(self.seconds if model.training else 0.0)
        outputs: Tensor = model(batch["inputs"])
        return outputs


class Doomed(Regression):
    """Its third step is its end, by a signal that nobody hears."""

    steps = 0

    def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        self.steps += model.training
        if self.steps == 3:
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        outputs: Tensor = model(batch["inputs"])
        return outputs
