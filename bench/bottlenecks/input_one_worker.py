"""Bottleneck: one loader worker waits 1.5 ms per sample (a remote store), one sample after the other.
--mended: num_workers=16, so that the waits overlap."""

import argparse
import json
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class RemoteStore(Dataset):
    def __init__(self, count: int, features: int):
        self.data = torch.randn(count, features, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        time.sleep(0.0015)  # round trip to the store
        return self.data[index], index % 10


def now(device: str) -> float:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    batch, width = (64, 4096) if args.device.startswith("cuda") else (32, 768)
    loader = DataLoader(
        RemoteStore(100 * batch, 512),
        batch_size=batch,
        shuffle=True,
        num_workers=16 if args.mended else 1,
        persistent_workers=True,
    )
    model = nn.Sequential(
        nn.Linear(512, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 10),
    ).to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    step, start = 0, now(args.device)
    while step < args.steps:
        for inputs, labels in loader:
            inputs, labels = inputs.to(args.device), labels.to(args.device)
            loss = nn.functional.cross_entropy(model(inputs), labels)
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
