"""One of several processes that train a small model together.

Rank 1 (rank 0 if it is alone) has memory for `MOST` samples only: in the loss, or where the variant says.

- plain: two layers.
- norm: with batch normalisation; memory runs out in the forward pass.
- backward: memory runs out in the backward pass; wrapped in DistributedDataParallel even if it is alone.
- static: DDP with a fixed graph.
- unused: with a parameter that nothing uses, which DDP looks for; "idle": which it does not look for.
- wrapped: DDP inside another module.
- uneven: the second part of a window has one sample.
- apart: gradients are averaged after backward, as captured steps do it.
- held: the same with a weight that is also used beside its module, and activations that are recomputed.
- fading: as apart, with weights that nothing uses after six steps.
- slow: the first rank takes longer to compute; "slow norm" with batch normalisation, "slow apart" as above.
- trial: both ways of averaging are tried; so in all that follow.
- watched: the first rank has hooks on its weights.
- order: each rank's optimizer has its weights in another order.
- reentrant: activations are recomputed in the way that cannot be averaged after backward.
- broken: averaging after backward raises on the second rank.
- late: the update after that raises there, when the first has gone on.

Writes losses and weights to FOLDER/rank-RANK.json, and what it says to FOLDER/rank-RANK.txt.
"""

import faulthandler
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from hotloop import Step, StepSettings
from hotloop.train import trial


class Limited(nn.Module):
    """Lets so many samples through."""

    def __init__(self, most: int, backward: bool) -> None:
        super().__init__()
        self.most, self.backward = most, backward

    def forward(self, x: Tensor) -> Tensor:
        if self.backward:
            result: Tensor = LimitedBackward.apply(x, self.most)
            return result
        if len(x) > self.most:
            raise torch.OutOfMemoryError("this rank's memory is full")
        return x


class LimitedBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, most: int) -> Tensor:
        ctx.most = most
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        if len(gradients[0]) > ctx.most:
            raise torch.OutOfMemoryError("this rank's memory is full")
        return gradients[0], None


class Fading(nn.Module):
    """Uses its weights six times."""

    def __init__(self) -> None:
        super().__init__()
        self.extra, self.left = nn.Linear(16, 16), 6

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        return x + self.extra(x) if self.left >= 0 else x


class Outer(nn.Module):
    """A module around another."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.module(x)
        return result


class Recomputed(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.module, x.requires_grad_(), use_reentrant=True)
        return result


class Held(nn.Module):
    """Uses the weight of its first layer a second time, where it does not look the layer up."""

    def __init__(self, module: nn.Sequential) -> None:
        super().__init__()
        self.module = module
        self.weights = [next(module.parameters())]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.module, x, use_reentrant=False)
        return y * self.weights[0].square().sum()


SLOW_SECONDS = 0.06
TRIALS = ("trial", "watched", "order", "reentrant", "broken", "late")


def try_both_ways(step: Step, broken: str) -> None:
    """As on GPUs, though nothing is captured: three windows of each way, then two that are timed."""
    trial._SETTLE, trial._TIMED = 3, 2
    torch.cuda.synchronize = lambda *_: None
    step._trial = trial.start_trial(step._ranks, step._gradients, step.executor.give_up)

    def cannot(*_: object) -> None:
        if step._ranks.apart:
            raise RuntimeError("this rank cannot")

    if broken == "broken":
        step._gradients.flat_of = cannot  # type: ignore[method-assign]
    if broken == "late":
        step.optimizer.register_step_pre_hook(cannot)


def build(variant: str, most: int) -> nn.Module:
    torch.manual_seed(0)
    middle: list[nn.Module] = [nn.Tanh()]
    if variant.endswith("norm"):
        middle = [nn.BatchNorm1d(16), Limited(most, backward=False)]
    if variant == "backward":
        middle = [Limited(most, backward=True)]
    model: nn.Module = nn.Sequential(nn.Linear(6, 16), *middle, nn.Linear(16, 3))
    if variant == "reentrant":
        model = nn.Sequential(Recomputed(nn.Sequential(nn.Linear(6, 16), nn.Tanh())), nn.Linear(16, 3))
    if variant == "held":
        model = Held(nn.Sequential(nn.Linear(6, 16), *middle, nn.Linear(16, 3)))
    if variant == "fading":
        model = nn.Sequential(nn.Linear(6, 16), Fading(), nn.Linear(16, 3))
    if variant in ("unused", "idle"):
        model.register_parameter("nobody", nn.Parameter(torch.ones(3)))
    return model


def main(rank: int, size: int, folder: Path, window: int, most: int, kind: str, variant: str) -> None:
    said = os.open(folder / f"rank-{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(said, 1)
    os.dup2(said, 2)
    faulthandler.dump_traceback_later(60, exit=True, file=said)  # says where it hangs
    torch.set_num_threads(1)
    cards = torch.cuda.device_count()
    device = torch.device(kind, rank % cards) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    told: list[str] = []
    sizes: list[int] = []
    short_of_memory = rank == min(1, size - 1)
    backend = "nccl" if kind == "cuda" and size <= cards else "gloo"
    distributed.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=size)
    model = build(variant, most if short_of_memory else 100).to(device)
    if size > 1 or variant == "backward":
        options = {"static": {"static_graph": True}, "unused": {"find_unused_parameters": True}}.get(variant, {})
        model = DistributedDataParallel(model, [device] if kind == "cuda" else None, **options)  # type: ignore[arg-type]
    if variant == "wrapped":
        model = Outer(model)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        sizes.append(len(batch[1]))
        if variant.startswith("slow") and rank == 0:
            time.sleep(SLOW_SECONDS)
        if short_of_memory and variant in ("plain", "uneven", "wrapped", "static") and len(batch[1]) > most:
            raise torch.OutOfMemoryError("this rank's memory is full")
        return functional.cross_entropy(model(batch[0]), batch[1])

    weights = list(model.parameters())
    if variant == "watched" and rank == 0:
        weights[0].register_hook(lambda gradient: None)
    if variant == "order":
        weights = weights[rank:] + weights[:rank]
    optimizer = torch.optim.AdamW(weights, lr=0.02, weight_decay=0.5)
    step = Step(model, loss, optimizer, settings=StepSettings(clip_norm=0.5), notify=told.append)
    if variant in ("apart", "held", "slow apart", "fading") and size > 1:
        step._ranks.apart, step._trial = True, None
    if variant in TRIALS and size > 1:
        try_both_ways(step, variant if short_of_memory else "")
    data = torch.Generator().manual_seed(1)
    values, error = [], ""
    for _ in range(45 if kind == "cuda" else 16):  # captured after 30, if that proves faster
        total = 0.0
        for part in range(window):
            rows = 2 if variant == "uneven" and part else 16
            inputs, labels = torch.randn(rows, 6, generator=data), torch.randint(0, 3, (rows,), generator=data)
            own = slice(rank * rows // size, (rank + 1) * rows // size)
            batch = inputs[own].to(device), labels[own].to(device)
            share = rows / (18 if variant == "uneven" else 16 * window)
            try:
                total += step(batch, share, part == window - 1).item()
            except Exception as caught:
                error = f"{type(caught).__name__}: {caught}"
                break
        if error:
            break
        values.append(total)
    weights = torch.cat([parameter.detach().flatten().cpu() for parameter in model.parameters()])
    content = {"losses": values, "weights": weights.tolist(), "told": told, "pieces": step.pieces, "error": error,
               "sizes": sizes, "captured": step.captured, "not_captured": step.not_captured,
               "apart": step._ranks.apart, "communication": step.communication.seconds}  # fmt: skip
    (folder / f"rank-{rank}.json").write_text(json.dumps(content))
    if not error:
        distributed.barrier()
        distributed.destroy_process_group()
    os._exit(0)  # gloo's threads abort a process that ends while its peers are still there
