"""A task of one's own in thirty lines: a straight line through noisy points."""

import numpy as np
from torch import Tensor, nn

import hotloop


class Points(hotloop.Dataset):
    """Points on y = 2x + 1, each with a little noise."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def sample(self, index: int, random: np.random.Generator) -> dict[str, np.ndarray]:
        x = np.array([index / self.count], dtype=np.float32)
        noise = random.normal(scale=0.05, size=1).astype(np.float32)
        return {"inputs": x, "targets": 2 * x + 1 + noise}

    def fingerprint(self) -> str:
        return f"{self.count} points on y = 2x + 1"


class Line(hotloop.Task):
    """Fits a line."""

    def __init__(self, job: hotloop.Job, points: int = 1000) -> None:
        super().__init__(job)
        self.points = points

    def data(self, split: str) -> hotloop.Dataset:
        return Points(self.points if split == "train" else 100)

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return (outputs - batch["targets"]).square().mean()

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"largest_error": (outputs - batch["targets"]).abs().max()}
