"""Bottleneck (cuda only): an optimizer written by hand (LARS) reads the norms of each weight and of its gradient with
.item(), so host and GPU work by turns.
--mended: the same arithmetic with the norms left on the GPU."""

import argparse
import json
import sys
import time

import torch
from torch import nn


class Lars(torch.optim.Optimizer):
    def __init__(self, weights, lr, mended):
        super().__init__(weights, {"lr": lr})
        self.mended = mended

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                size, slope = weight.norm(), weight.grad.norm()
                if self.mended:
                    weight.addcmul_(weight.grad, size / (slope + 1e-6), value=-group["lr"])
                else:
                    weight.add_(weight.grad, alpha=-group["lr"] * size.item() / (slope.item() + 1e-6))


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
    rows, width, count = 64, 3072, 16
    all_inputs = torch.randn(20 * rows, width, device=args.device)
    all_labels = torch.randint(0, 10, (20 * rows,), device=args.device)
    loader = list(zip(all_inputs.split(rows), all_labels.split(rows)))
    layers = [layer for _ in range(count) for layer in (nn.Linear(width, width, bias=False), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(width, 10, bias=False)).to(args.device)
    optimizer = Lars(model.parameters(), 0.001, args.mended)
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
