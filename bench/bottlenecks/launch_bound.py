"""Bottleneck (cuda only): 300 tiny layers on batches of 8, so launching kernels costs more than running them.
--mended: the model is compiled with torch.compile(mode="reduce-overhead"), which replays CUDA graphs."""

import argparse
import json
import sys
import time

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)
        self.act = nn.GELU()

    def forward(self, x):
        return x + 0.1 * self.act(self.linear(self.norm(x)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args()
    if not args.device.startswith("cuda"):
        print("launch_bound.py needs a cuda device", file=sys.stderr)
        sys.exit(3)
    torch.manual_seed(0)
    batch = 8
    all_inputs = torch.randn(100 * batch, 64, device=args.device)
    all_labels = torch.randint(0, 10, (100 * batch,), device=args.device)
    loader = list(zip(all_inputs.split(batch), all_labels.split(batch)))
    model = nn.Sequential(*[Block(64) for _ in range(100)], nn.Linear(64, 10)).to(args.device)
    if args.mended:
        model = torch.compile(model, mode="reduce-overhead")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step, start = 0, time.perf_counter()
    while step < args.steps:
        for inputs, labels in loader:
            loss = nn.functional.cross_entropy(model(inputs), labels)
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
