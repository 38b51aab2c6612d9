"""Bottleneck: num_workers=0, so every batch waits for a block-by-block image decode in __getitem__.
--mended: all images decoded once into memory before training, batches taken by slicing."""

import argparse
import json
import sys
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class EncodedImages(Dataset):
    def __init__(self, count: int, size: int):
        shape = (count, 3 * (size // 8) ** 2, 8, 8)
        self.blocks = np.random.default_rng(0).integers(-8, 9, shape, dtype=np.int8)
        k, n = np.meshgrid(np.arange(8), np.arange(8), indexing="ij")
        self.basis = (np.cos(np.pi * (n + 0.5) * k / 8) / 2).astype(np.float32)
        self.size = size

    def __len__(self):
        return len(self.blocks)

    def __getitem__(self, index):
        n = self.size // 8
        image = np.empty((3, self.size, self.size), dtype=np.float32)
        for i, block in enumerate(self.blocks[index]):
            c, y, x = i // (n * n), i // n % n * 8, i % n * 8
            image[c, y : y + 8, x : x + 8] = self.basis.T @ (block * np.float32(0.1)) @ self.basis
        return torch.from_numpy(image), index % 10


parser = argparse.ArgumentParser()
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--mended", action="store_true")

if __name__ == "__main__":
    args = parser.parse_args()
    torch.manual_seed(0)
    on_cuda = args.device.startswith("cuda")
    batch, width = (64, 128) if on_cuda else (32, 16)
    dataset = EncodedImages(32 * batch, 64)
    loader = DataLoader(dataset, batch_size=batch, num_workers=0)
    if args.mended:
        all_images = torch.stack([dataset[i][0] for i in range(len(dataset))])
        all_labels = torch.arange(len(dataset)) % 10
        loader = [(all_images[i : i + batch], all_labels[i : i + batch]) for i in range(0, len(dataset), batch)]
    model = nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(4),
        nn.Conv2d(width, width, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, 10),
    ).to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    step, start = 0, time.perf_counter()
    while step < args.steps:
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images.to(args.device)), labels.to(args.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if on_cuda and step in (args.steps // 2, args.steps):
                torch.cuda.synchronize()
            if step == args.steps // 2:
                start = time.perf_counter()
            if step == args.steps:
                break
    seconds = (time.perf_counter() - start) / (args.steps - args.steps // 2)
    print(f"final loss {loss.item():.4f}", file=sys.stderr)
    print(json.dumps({"step_seconds": seconds}))
