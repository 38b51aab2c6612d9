"""One of several processes that train a small model together: `ranks.py RANK SIZE FOLDER WINDOW MOST DEVICE`.

Rank 1 has memory for `MOST` samples only. Writes losses and weights to FOLDER/rank-RANK.json.
"""

import faulthandler
import json
import sys
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from hotloop import Step, StepSettings


def main() -> None:
    faulthandler.dump_traceback_later(60, exit=True)  # says where it hangs
    rank, size, window, most = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[4]), int(sys.argv[5])
    folder, kind = Path(sys.argv[3]), sys.argv[6]
    torch.set_num_threads(1)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    told: list[str] = []
    sizes: list[int] = []
    backend = "nccl" if kind == "cuda" else "gloo"
    distributed.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=size)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).to(device)
    if size > 1:
        model = DistributedDataParallel(model, [rank] if kind == "cuda" else None)  # type: ignore[assignment]

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        sizes.append(len(batch[1]))
        if rank == 1 and len(batch[1]) > most:
            raise torch.OutOfMemoryError("this rank's memory is full")
        return functional.cross_entropy(model(batch[0]), batch[1])

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = Step(model, loss, optimizer, settings=StepSettings(clip_norm=0.5), notify=told.append)
    data = torch.Generator().manual_seed(1)
    values = []
    for _ in range(16):
        total = 0.0
        for part in range(window):
            inputs, labels = torch.randn(16, 6, generator=data), torch.randint(0, 3, (16,), generator=data)
            own = slice(rank * 16 // size, (rank + 1) * 16 // size)
            batch = inputs[own].to(device), labels[own].to(device)
            total += step(batch, 1 / window, part == window - 1).item()
        values.append(total)
    weights = torch.cat([parameter.detach().flatten().cpu() for parameter in model.parameters()])
    content = {"losses": values, "weights": weights.tolist(), "told": told, "pieces": step.pieces,
               "sizes": sizes, "captured": step.captured, "not_captured": step.not_captured}  # fmt: skip
    (folder / f"rank-{rank}.json").write_text(json.dumps(content))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
