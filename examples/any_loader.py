"""A DataLoader's batches, copied to the GPU ahead of a step of one's own."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import hotloop

device = "cuda" if torch.cuda.is_available() else "cpu"
points = torch.randn(4096, 2)
inside = (points.square().sum(1) < 1.4).long()
loader = DataLoader(TensorDataset(points, inside), batch_size=64, shuffle=True)

model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2)).to(device)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


step = hotloop.Step(model, loss, torch.optim.AdamW(model.parameters(), lr=0.01))
for _ in range(3):
    for batch in hotloop.prefetch(loader, device):
        value = step(batch)
print(f"loss {value.item():.3f} on {device}")
