"""One of several processes over which a small model of a job is spread.

- ddp: with batch normalisation.
- plain: the same in torch's own DistributedDataParallel.
- ddp frozen, plain frozen: its normalisation learns three steps, and is fixed from then on.
- ddp buffers: with a buffer of another kind.
- float8: divided (FSDP2), linear layers multiply in float8, emulated on the CPU; "float8 one" alone, on all samples.

Writes losses, weights and what else it saw to FOLDER/rank-RANK.json.
"""

import faulthandler
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from hotloop import Step, StepSettings
from hotloop.core.job import Job
from hotloop.train.precision import use_float8
from hotloop.train.ranks import evaluated, spread
from hotloop.train.world import World

_ROWS = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.relu(self.up(x)))
        return result


def of_blocks() -> nn.Module:
    import torchao.float8

    emulated = torchao.float8.Float8LinearConfig(emulate=True)
    torchao.float8.convert_to_float8_training = partial(torchao.float8.convert_to_float8_training, config=emulated)
    model = nn.Sequential(nn.Linear(16, 32), Block(), Block(), nn.Linear(32, 4))
    use_float8(model)
    return model


def normalised(variant: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    if "buffers" in variant:
        model.register_buffer("seen", torch.zeros(1))
    return model


def main(rank: int, size: int, folder: Path, variant: str) -> None:
    said = os.open(folder / f"rank-{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(said, 1)
    os.dup2(said, 2)
    faulthandler.dump_traceback_later(60, exit=True, file=said)  # says where it hangs
    torch.set_num_threads(1)
    # A device mesh looks for a group that was started as torchrun does it.
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    float8 = variant.startswith("float8")
    torch.manual_seed(0)
    model = of_blocks() if float8 else normalised(variant)
    norm = next((module for module in model.modules() if isinstance(module, nn.BatchNorm1d)), None)
    world = World(rank, size, rank, size, group=distributed.group.WORLD)
    shared = {"parallel": "fsdp", "precision": "float8"} if float8 else {"parallel": "ddp", "precision": "fp32"}
    job = Job.model_validate({"device": "cpu", "data": {"train": "none"}, "model": {"name": "none"}, **shared})
    if variant.startswith("plain"):
        model = DistributedDataParallel(model)
    elif variant != "float8 one":
        model = spread(model, world, job, lambda: model)
    types: set[str] = set()
    if float8:
        model[1].up.register_forward_pre_hook(lambda layer, _: types.add(str(layer.weight.dtype)))  # type: ignore[index]
    syncs = watched(model) if isinstance(model, DistributedDataParallel) else []
    losses, places = trained(model, rank, size, variant, norm)
    evaluated(model, None)
    state = {} if float8 else {name: tensor.tolist() for name, tensor in model.state_dict().items()}
    content = {"losses": losses, "state": state, "types": sorted(types), "syncs": len(syncs), "places": places}
    (folder / f"rank-{rank}.json").write_text(json.dumps(content))
    distributed.barrier()
    distributed.destroy_process_group()
    os._exit(0)


def watched(ddp: DistributedDataParallel) -> list[int]:
    """Filled with a number for each time that buffers are sent."""
    sync, found = ddp._sync_module_buffers, []

    def noted(authoritative_rank: int) -> None:
        found.append(authoritative_rank)
        sync(authoritative_rank)  # type: ignore[no-untyped-call]

    ddp._sync_module_buffers = noted  # type: ignore[method-assign]
    return found


def place_of(gradient: Tensor | None) -> int:
    return gradient.untyped_storage().data_ptr() if gradient is not None else 0


def trained(
    model: nn.Module, rank: int, size: int, variant: str, norm: nn.Module | None
) -> tuple[list[float], list[int]]:
    """Of each step the loss, and in how many pieces of memory the gradients were."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(weights, lr=0.01)
    places: list[int] = []
    if "float8" not in variant:
        optimizer.register_step_pre_hook(lambda *_: places.append(len({place_of(each.grad) for each in weights})))
    settings = StepSettings(precision="float8" if variant.startswith("float8") else "fp32")
    step = Step(model, loss, optimizer, settings=settings)
    data = torch.Generator().manual_seed(1)
    values = []
    for number in range(6):
        inputs = torch.randn(2 * _ROWS, 16, generator=data)
        labels = (inputs.sum(1) > 0).long()
        own: Any = slice(None) if variant == "float8 one" else slice(rank * _ROWS, (rank + 1) * _ROWS)
        if norm and "frozen" in variant and number == 3:
            norm.eval()
        value = step((inputs[own], labels[own])) / size
        distributed.all_reduce(value)
        values.append(value.item())
    return values, places
