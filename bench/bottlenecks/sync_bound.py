"""Bottleneck (cuda only): loss, accuracy and two norms per parameter are read with .item() in every step.
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
    all_inputs = torch.randn(20 * 1024, 512, device=args.device)
    all_labels = torch.randint(0, 10, (20 * 1024,), device=args.device)
    loader = list(zip(all_inputs.split(1024), all_labels.split(1024)))
    model = nn.Sequential(*[Block(512) for _ in range(48)], nn.Linear(512, 10)).to(args.device)
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=0.01)
    totals = torch.zeros(2 + 2 * len(params), device=args.device)
    history = [0.0] * len(totals)
    step, start = 0, time.perf_counter()
    while step < args.steps:
        for inputs, labels in loader:
            outputs = model(inputs)
            loss = nn.functional.cross_entropy(outputs, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            accuracy = (outputs.argmax(1) == labels).float().mean()
            if args.mended:
                norms = torch._foreach_norm([p.grad for p in params] + [p.detach() for p in params])
                totals += torch.stack([loss.detach(), accuracy, *norms])
                if step % 50 == 49:
                    history = totals.tolist()
            else:
                values = [loss.item(), accuracy.item()]
                values += [p.grad.norm().item() for p in params] + [p.detach().norm().item() for p in params]
                history = [a + b for a, b in zip(history, values)]
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
