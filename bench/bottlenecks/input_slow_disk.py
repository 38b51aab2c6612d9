"""Bottleneck: each sample is a file on a slow network disk (3 ms of latency), read by one worker.
--mended: the disk answers at once (no latency)."""

import argparse
import json
import os
import sys
import tempfile
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class FolderDataset(Dataset):
    def __init__(self, folder: str, latency: float):
        self.paths = sorted(os.path.join(folder, name) for name in os.listdir(folder))
        self.latency = latency

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        time.sleep(self.latency)
        return torch.from_numpy(np.load(self.paths[index])).float() / 255, index % 10


def now(device: str) -> float:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()


def train(args, folder: str):
    batch, width = (32, 128) if args.device.startswith("cuda") else (16, 24)
    rng = np.random.default_rng(0)
    for i in range(100 * batch):
        np.save(os.path.join(folder, f"{i:05d}.npy"), rng.integers(0, 256, (3, 64, 64), dtype=np.uint8))
    dataset = FolderDataset(folder, latency=0.0 if args.mended else 0.003)
    loader = DataLoader(dataset, batch_size=batch, shuffle=True, num_workers=1, persistent_workers=True)
    model = nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, width, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, 10),
    ).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step, start = 0, now(args.device)
    while step < args.steps:
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images.to(args.device)), labels.to(args.device))
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
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--mended", action="store_true")
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        train(parser.parse_args(), folder)
