"""Bottleneck: two loader workers cannot keep up with a heavy numpy blur (60 passes) in __getitem__.
--mended: a single blur pass per image."""

import argparse
import json
import sys
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class BlurredImages(Dataset):
    def __init__(self, count: int, size: int, passes: int):
        self.images = np.random.default_rng(0).integers(0, 256, (count, 3, size, size), dtype=np.uint8)
        self.passes = passes

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index].astype(np.float32) / 255
        for _ in range(self.passes):
            image = (
                image + np.roll(image, 1, 1) + np.roll(image, -1, 1) + np.roll(image, 1, 2) + np.roll(image, -1, 2)
            ) / 5
        return torch.from_numpy(image), index % 10


def now(device: str) -> float:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    batch, width = (32, 128) if args.device.startswith("cuda") else (16, 16)
    dataset = BlurredImages(100 * batch, 64, passes=1 if args.mended else 60)
    loader = DataLoader(dataset, batch_size=batch, shuffle=True, num_workers=2, persistent_workers=True)
    model = nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, 10),
    ).to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    step, start = 0, now(args.device)
    while step < args.steps:
        for images, labels in loader:
            images, labels = images.to(args.device), labels.to(args.device)
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step == args.steps // 2:
                start = now(args.device)
            if step == args.steps:
                break
    seconds = (now(args.device) - start) / (args.steps - args.steps // 2)
    print(f"final loss {loss.item():.4f}", file=sys.stderr)
    print(json.dumps({"step_seconds": seconds}))


if __name__ == "__main__":
    main()
