"""Bottleneck: torch.compile(dynamic=False) and a sequence length that is new in every step, so it recompiles.
--mended: every sequence has the same length."""

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


class Tagger(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.embed = nn.Embedding(1000, width)
        self.hidden = nn.Linear(width, width)
        self.head = nn.Linear(width, 10)

    def forward(self, tokens):
        return self.head(torch.relu(self.hidden(self.embed(tokens))).mean(1))


def batches(steps: int, batch: int, fixed: bool):
    for step in range(steps):  # the length grows by one token per step, with the same mean
        length = 32 + (steps // 2 if fixed else step)
        yield torch.randint(0, 1000, (batch, length)), torch.randint(0, 10, (batch,))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--mended", action="store_true")
    parser.add_argument("--backend", default="aot_eager", help="inductor works too: seconds per recompilation")
    args = parser.parse_args()
    torch._dynamo.config.recompile_limit = 100_000
    torch._dynamo.config.accumulated_recompile_limit = 100_000
    torch.manual_seed(0)
    batch, width = (256, 1024) if args.device.startswith("cuda") else (16, 384)
    model = Tagger(width).to(args.device)
    compiled = torch.compile(model, dynamic=False, backend=args.backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    start = now(args.device)
    for step, (tokens, labels) in enumerate(batches(args.steps, batch, args.mended), 1):
        tokens, labels = tokens.to(args.device), labels.to(args.device)
        loss = nn.functional.cross_entropy(compiled(tokens), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == args.steps // 2:
            start = now(args.device)
    seconds = (now(args.device) - start) / (args.steps - args.steps // 2)
    print(f"final loss {loss.item():.4f}", file=sys.stderr)
    print(json.dumps({"step_seconds": seconds}))


if __name__ == "__main__":
    main()
