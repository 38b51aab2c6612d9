"""Bottleneck (cuda only): the loss of each sample is read with .item(), and the host waits each time.
--mended: the losses come to the host at once."""

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
        print("sync_bound.py needs a cuda device", file=sys.stderr)
        sys.exit(3)
    torch.manual_seed(0)
    rows, width = 512, 512
    all_inputs = torch.randn(20 * rows, width, device=args.device)
    all_labels = torch.randint(0, 10, (20 * rows,), device=args.device)
    loader = list(zip(all_inputs.split(rows), all_labels.split(rows)))
    model = nn.Sequential(
        nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 10)
    ).to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    hardness = []
    step, start = 0, time.perf_counter()
    while step < args.steps:
        for inputs, labels in loader:
            losses = nn.functional.cross_entropy(model(inputs), labels, reduction="none")
            loss = losses.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen = losses.detach()
            hardness = seen.tolist() if args.mended else [value.item() for value in seen.unbind()]
            step += 1
            if step == args.steps // 2:
                torch.cuda.synchronize()
                start = time.perf_counter()
            if step == args.steps:
                break
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / (args.steps - args.steps // 2)
    print(f"final loss {loss.item():.4f}, hardest {max(hardness):.4f}", file=sys.stderr)
    print(json.dumps({"step_seconds": seconds}))


if __name__ == "__main__":
    main()
