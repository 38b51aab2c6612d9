"""An ordinary training script, whose data comes too slowly: what `hotloop profile` says of it is in docs/profile.md."""

import time

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


class Measurements(Dataset[tuple[Tensor, int]]):
    """Samples from a store that takes 3 ms to answer."""

    def __len__(self) -> int:
        return 640

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(0.003)
        generator = torch.Generator().manual_seed(index)
        return torch.randn(64, generator=generator), index % 10


def main() -> None:
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Measurements(), batch_size=16, num_workers=1)
    for epoch in range(20):
        for features, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(features), labels)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: {loss.item():.3f}")


if __name__ == "__main__":
    main()
