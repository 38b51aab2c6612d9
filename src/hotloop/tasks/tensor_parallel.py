"""Layers that several ranks compute together, and what goes on between them in a language model.

Between layers each rank has its part of the tokens, and normalises those; a layer's input is gathered and its output
summed up and given out again in one message each (Korthikanti et al., "Reducing activation recomputation in large
transformer models", 2022).

Shape suffixes: B batch, T tokens, D width.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from hotloop.tasks.cross_entropy import computed_in

_TOKENS = Shard(1)


@dataclass(frozen=True)
class Team:
    """The ranks that compute each layer together.

    Attributes:
        mesh: of one dimension.
    """

    mesh: DeviceMesh

    def divide_layers(self, around: nn.Module, first: str, last: str) -> None:
        """Give each rank its part of the first layer's outputs and of the last one's inputs; both are in `around`."""
        plan = {first: ColwiseParallel(), last: RowwiseParallel(output_layouts=_TOKENS)}
        parallelize_module(around, self.mesh, plan)
        around.register_forward_pre_hook(_narrowed)
        gathers = PrepareModuleInput(input_layouts=_TOKENS, desired_input_layouts=Replicate())
        parallelize_module(around, self.mesh, gathers)

    def divide_embedding(self, embedding: nn.Embedding) -> None:
        """By its width; each rank gets its part of the tokens."""
        style = ColwiseParallel(input_layouts=Replicate(), output_layouts=_TOKENS)
        parallelize_module(embedding, self.mesh, style)

    def divide_output(self, head: nn.Linear) -> None:
        """A layer whose weights are asked for by `whole`."""
        head.weight = nn.Parameter(distribute_tensor(head.weight, self.mesh, [Shard(0)]))

    def copy_norm(self, norm: nn.Module) -> None:
        """Each rank normalises its part of the tokens with the same weights."""
        parallelize_module(norm, self.mesh, SequenceParallel(use_local_output=True))

    def copy_table(self, module: nn.Embedding) -> None:
        """The same weights on each rank, of which it looks up those of its tokens by itself."""
        module.weight = nn.Parameter(distribute_tensor(module.weight, self.mesh, [Replicate()]))

    def own_rows(self, weight: Tensor, rows: int) -> Tensor:
        """This rank's part of the first so many rows of a table that all have."""
        assert isinstance(weight, DTensor)
        each = rows // self.mesh.size()
        start = self.mesh.get_local_rank() * each
        copy: Tensor = weight.to_local(grad_placements=[Partial()])
        return copy[start : start + each]

    def own_tokens(self, x_BT: Tensor) -> Tensor:
        """This rank's part of what is there for each token."""
        return x_BT.chunk(self.mesh.size(), dim=1)[self.mesh.get_local_rank()]

    def all_tokens(self, x_BTD: Tensor) -> Tensor:
        """All ranks' parts, on each of them."""
        whole: Tensor = DTensor.from_local(x_BTD, self.mesh, [_TOKENS]).full_tensor()
        return whole

    def whole(self, weight: Tensor) -> Tensor:
        """A divided weight in one piece, on each rank, each of which uses it for other tokens."""
        assert isinstance(weight, DTensor)
        full: Tensor = weight.full_tensor(grad_placements=[Partial()])
        return full

    def mean(self, value: Tensor, count: Tensor) -> Tensor:
        """Over the ranks, each of which has a mean of so many."""
        counts = DTensor.from_local(count.to(value.dtype), self.mesh, [Partial()]).full_tensor()
        own = torch.where(count > 0, value, 0.0) * (count / counts)  # the mean of none is NaN
        whole: Tensor = DTensor.from_local(own, self.mesh, [Partial()]).full_tensor()
        return whole.clone()  # FSDP2 warns of a view that a model returns


def _narrowed(around: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """What norms give in float32 under autocast is sent as layers take it, and so is its gradient: half the bytes."""
    x_BTD, *rest = given
    return x_BTD.to(computed_in(x_BTD)), *rest
