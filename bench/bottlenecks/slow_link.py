"""Bottleneck (torchrun, DDP): 8 million float32 gradients (31 MB) all-reduced over gloo per tiny batch.
--mended: a link that takes no time: gradients are not exchanged."""

import argparse
import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args()
    rank = int(os.environ["RANK"])
    device = torch.device("cpu")
    if args.device.startswith("cuda"):
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group("gloo")  # whatever the device: this is the slow link
    torch.manual_seed(rank)
    batch, width, depth = 4, 1400, 4
    all_inputs, all_labels = torch.randn(50 * batch, width), torch.randint(0, 10, (50 * batch,))
    loader = list(zip(all_inputs.split(batch), all_labels.split(batch)))
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(width, 10)).to(device))
    model.require_backward_grad_sync = not args.mended
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step, start = 0, now(device)
    while step < args.steps:
        for inputs, labels in loader:
            loss = nn.functional.cross_entropy(model(inputs.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step == args.steps // 2:
                start = now(device)
            if step == args.steps:
                break
    seconds = (now(device) - start) / (args.steps - args.steps // 2)
    if rank == 0:
        print(f"final loss {loss.item():.4f}", file=sys.stderr)
        print(json.dumps({"step_seconds": seconds}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
