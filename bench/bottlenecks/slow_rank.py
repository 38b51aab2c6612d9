"""Bottleneck (torchrun, DDP): rank 1 spends 30 ms more per step than rank 0, which waits for it.
--mended: no rank does extra work."""

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
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device, backend = torch.device("cpu"), "gloo"
    if args.device.startswith("cuda"):
        gpus = torch.cuda.device_count()
        device, backend = torch.device("cuda", rank % gpus), "nccl" if gpus >= world else "gloo"
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    torch.manual_seed(rank)
    batch, width = (512, 2048) if device.type == "cuda" else (64, 384)
    all_inputs, all_labels = torch.randn(50 * batch, width), torch.randint(0, 10, (50 * batch,))
    loader = list(zip(all_inputs.split(batch), all_labels.split(batch)))
    layers: list = []
    for _ in range(6):
        layers += [nn.Linear(width, width), nn.ReLU()]
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(width, 10)).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step, start = 0, now(device)
    while step < args.steps:
        for inputs, labels in loader:
            if rank == 1 and not args.mended:
                time.sleep(0.03)  # e.g. this rank reads from a slower disk
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
