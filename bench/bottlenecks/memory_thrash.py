"""Bottleneck (cuda only): torch.cuda.empty_cache() in every step with activations of varying size, so that
cudaMalloc/cudaFree dominate. --mended: no empty_cache, which is what the finding says to do."""

import argparse
import json
import random
import sys
import time

import torch
from torch import nn


def batches(count: int, device: str):
    rng = random.Random(0)
    for _ in range(count):
        rows = rng.randrange(64 * 1024, 128 * 1024)
        yield torch.randn(rows, 64, device=device), torch.randint(0, 10, (rows,), device=device)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args()
    if not args.device.startswith("cuda"):
        print("memory_thrash.py needs a cuda device", file=sys.stderr)
        sys.exit(3)
    torch.manual_seed(0)
    layers: list = []
    for _ in range(32):
        layers += [nn.Linear(64, 64), nn.GELU()]
    model = nn.Sequential(*layers, nn.Linear(64, 10)).to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    start = time.perf_counter()
    for step, (points, labels) in enumerate(batches(args.steps, args.device), 1):
        loss = nn.functional.cross_entropy(model(points), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not args.mended:
            torch.cuda.empty_cache()
        if step == args.steps // 2:
            torch.cuda.synchronize()
            start = time.perf_counter()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / (args.steps - args.steps // 2)
    print(f"final loss {loss.item():.4f}", file=sys.stderr)
    print(json.dumps({"step_seconds": seconds}))


if __name__ == "__main__":
    main()
