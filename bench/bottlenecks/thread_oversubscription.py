"""Bottleneck: torch.set_num_threads(32 or more) on few cores, with many medium matmuls on the CPU per batch.
--mended: as many threads as there are usable cores (at most 16)."""

import argparse
import json
import os
import sys
import time

import torch
from torch import nn


def now(device: str) -> float:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()


def whiten(inputs: torch.Tensor, rotations: list) -> torch.Tensor:
    for rotation in rotations:  # always on the CPU, before the batch goes to the device
        inputs = torch.tanh(inputs @ rotation)
    return inputs


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(min(cores, 16) if args.mended else max(32, 4 * cores))
    torch.manual_seed(0)
    batch, width, depth = 128, 256, 12
    all_inputs = torch.randn(50 * batch, width)
    all_labels = torch.randint(0, 10, (50 * batch,))
    loader = list(zip(all_inputs.split(batch), all_labels.split(batch)))
    rotations = [torch.randn(width, width) / width**0.5 for _ in range(24)]
    layers: list = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(width, 10)).to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    step, start = 0, now(args.device)
    while step < args.steps:
        for inputs, labels in loader:
            inputs, labels = whiten(inputs, rotations).to(args.device), labels.to(args.device)
            loss = nn.functional.cross_entropy(model(inputs), labels)
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
