"""Bottleneck (cuda only): loss and the mean output of each of 24 blocks are read with .item() in every step, so the GPU
runs dry again and again, and host and GPU work by turns.
--mended: the same values are accumulated on the device and read every 50 steps."""

import argparse
import json
import sys
import time

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())

    def forward(self, x):
        return x + 0.1 * self.layers(x)


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
    rows, width, count = 2048, 1024, 24
    all_inputs = torch.randn(20 * rows, width, device=args.device)
    all_labels = torch.randint(0, 10, (20 * rows,), device=args.device)
    loader = list(zip(all_inputs.split(rows), all_labels.split(rows)))
    blocks = nn.ModuleList([Block(width) for _ in range(count)]).to(args.device)
    head = nn.Linear(width, 10).to(args.device)
    optimizer = torch.optim.SGD([*blocks.parameters(), *head.parameters()], lr=0.01)
    totals = torch.zeros(count + 1, device=args.device)
    history = [0.0] * len(totals)
    step, start = 0, time.perf_counter()
    while step < args.steps:
        for inputs, labels in loader:
            values = []
            for block in blocks:
                inputs = block(inputs)
                mean = inputs.detach().abs().mean()
                values.append(mean if args.mended else mean.item())
            loss = nn.functional.cross_entropy(head(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if args.mended:
                totals += torch.stack([*values, loss.detach()])
                if step % 50 == 49:
                    history = totals.tolist()
            else:
                history = [a + b for a, b in zip(history, [*values, loss.item()])]
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
