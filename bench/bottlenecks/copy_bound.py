"""Bottleneck (cuda only): 154 MB float32 batches in pageable memory, blocking .to(device), tiny model.
--mended: all data placed on the GPU once before training."""

import argparse
import json
import sys
import time

import torch
from torch import nn


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args()
    if not args.device.startswith("cuda"):
        print("copy_bound.py needs a cuda device", file=sys.stderr)
        sys.exit(3)
    torch.manual_seed(0)
    batch, count = 256, 8  # 256 x 3 x 224 x 224 x 4 bytes
    all_images = torch.randn(count * batch, 3, 224, 224)
    all_labels = torch.randint(0, 10, (count * batch,))
    if args.mended:
        all_images, all_labels = all_images.to(args.device), all_labels.to(args.device)
    loader = list(zip(all_images.split(batch), all_labels.split(batch)))
    model = nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(3 * 28 * 28, 64), nn.ReLU(), nn.Linear(64, 10)).to(
        args.device
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step, start = 0, time.perf_counter()
    while step < args.steps:
        for images, labels in loader:
            images = images.to(args.device)
            labels = labels.to(args.device)
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step == args.steps // 2:
                torch.cuda.synchronize()
                start = time.perf_counter()
            if step == args.steps:
                break
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / (args.steps - args.steps // 2)
    print(f"final loss {loss.item():.4f}", file=sys.stderr)
    print(json.dumps({"step_seconds": seconds}))


if __name__ == "__main__":
    main()
