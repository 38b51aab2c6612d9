"""Bottleneck (cuda only): 300 tiny layers on batches of 8, so launching kernels costs more than running them.
--mended: the whole step (forward, backward, optimizer) is one CUDA graph, captured after a warm-up and replayed."""

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


class CapturedStep:
    """A step as one CUDA graph, as in https://docs.pytorch.org/docs/stable/notes/cuda.html#whole-network-capture

    A graph reads and writes the addresses that it was captured with: batches are copied to where it reads them,
    gradients are made anew while it is captured and stay where they are then, and the loss is where it was written.
    """

    WARM_UP = 3

    def __init__(self, model, optimizer, inputs, labels):
        self.inputs, self.labels = inputs.clone(), labels.clone()
        kept = [value.clone() for value in model.state_dict().values()]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # what is set up at the first call must not be captured
            for _ in range(self.WARM_UP):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(self.inputs), self.labels).backward()
                optimizer.step()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.no_grad():  # these steps were none of the training's; SGD without momentum has no other state
            for value, before in zip(model.state_dict().values(), kept):
                value.copy_(before)
        self.graph = torch.cuda.CUDAGraph()
        optimizer.zero_grad()
        with torch.cuda.graph(self.graph):
            self.loss = nn.functional.cross_entropy(model(self.inputs), self.labels)
            self.loss.backward()
            optimizer.step()

    def __call__(self, inputs, labels):
        self.inputs.copy_(inputs)
        self.labels.copy_(labels)
        self.graph.replay()
        return self.loss


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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    captured = CapturedStep(model, optimizer, *loader[0]) if args.mended else None
    step, start = 0, time.perf_counter()
    while step < args.steps:
        for inputs, labels in loader:
            if captured:
                loss = captured(inputs, labels)
            else:
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
