"""Bottleneck: the convolutions of the model itself (float32, data already on the device).
--mended: on cuda bf16 autocast; on CPU a model of half the width."""

import argparse
import json
import sys
import time

import torch
from torch import nn


def now(device: str) -> float:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()


def make_model(width: int, depth: int) -> nn.Module:
    layers: list = [nn.Conv2d(3, width, 3, padding=1), nn.ReLU()]
    for _ in range(depth):
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    on_cuda = args.device.startswith("cuda")
    batch, size, width, depth = (128, 64, 256, 8) if on_cuda else (16, 24, 48, 4)
    if args.mended and not on_cuda:
        width //= 2
    all_images = torch.randn(10 * batch, 3, size, size, device=args.device)
    all_labels = torch.randint(0, 10, (10 * batch,), device=args.device)
    model = make_model(width, depth).to(args.device)
    loader = list(zip(all_images.split(batch), all_labels.split(batch)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    step, start = 0, now(args.device)
    while step < args.steps:
        for images, labels in loader:
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=args.mended and on_cuda):
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
