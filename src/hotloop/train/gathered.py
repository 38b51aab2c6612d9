"""Divided weights that stay gathered from a block's forward pass to its backward, where memory is left for them.

Else each is gathered twice a step. Llama 3's 8B shapes on four H200s, 8,192 tokens each: 9,830 tokens/s/GPU instead of
9,630, with 9 GiB more (bench/llama.py's loop by hand).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hotloop.core.units import format_bytes
from hotloop.train.blocks import gathered_apart

ROOM = 0.85
"""Share of a GPU's memory that may be taken with them: batches differ, and a divided training does not recover."""
_AFTER = 8
"""Windows: by then the optimizer has its state, and what is compiled and searched for has been."""


def has_room(peak_bytes: float, more_bytes: float, total_bytes: float) -> bool:
    """Whether weights may stay gathered."""
    return peak_bytes + more_bytes <= ROOM * total_bytes


def gpu_memory(device: torch.device) -> tuple[int, int]:
    """The most that torch has taken of a GPU, and what it can take."""
    free, _ = torch.cuda.mem_get_info(device)
    return torch.cuda.max_memory_reserved(device), free + torch.cuda.memory_reserved(device)


class Gathered:
    """Looks after some windows whether all ranks have room, and if so has the blocks keep what they gather.

    Args:
        model: of which `fully_shard` has divided blocks on a GPU; any other is left alone.
        notify: told, in a line, that they are kept.
        memory: the most that was taken, and all that there is, in bytes; the GPU's without.
    """

    def __init__(
        self, model: nn.Module, notify: Callable[[str], None],
        memory: Callable[[torch.device], tuple[int, int]] | None = None,
    ) -> None:  # fmt: skip
        # By the name that `fully_shard` gives: what `replicate` makes is an FSDPModule, too, and divides nothing.
        parts = [part for part in model.modules() if type(part).__name__.startswith("FSDP")]
        others = (model, *gathered_apart(model))
        self._blocks = [part for part in parts if isinstance(part, FSDPModule) and part not in others]
        self._notify, self._memory = notify, memory or gpu_memory
        has_memory = memory is not None or next(model.parameters()).is_cuda
        self._left = _AFTER if self._blocks and has_memory else 0

    def window_done(self) -> None:
        """Count a window; all ranks do so alike."""
        if self._left:
            self._left -= 1
            if not self._left:
                self._decide()

    def _decide(self) -> None:
        weights = {weight: block for block in self._blocks for weight in own_weights(block)}
        first = next(iter(weights))
        more = sum(map(gathered_bytes, weights, weights.values()))
        peak, total = self._memory(first.device)
        all_have = torch.tensor(int(has_room(peak, more, total)), device=first.device)
        for dimension in range(first.device_mesh.ndim):
            distributed.all_reduce(all_have, distributed.ReduceOp.MIN, first.device_mesh.get_group(dimension))
        if all_have.item():
            for block in self._blocks:
                block.set_reshard_after_forward(False, recurse=False)
            self._notify(f"memory is left: blocks keep {format_bytes(more)} of gathered weights until backward")


def own_weights(block: Any) -> list[DTensor]:
    """Those that a block divides, and no block within it."""
    inner: list[Any] = [part for part in block.modules() if isinstance(part, FSDPModule) and part is not block]
    inside = {id(weight) for part in inner for weight in part.parameters()}
    return [weight for weight in block.parameters() if isinstance(weight, DTensor) and id(weight) not in inside]


def gathered_bytes(weight: DTensor, block: FSDPModule) -> int:
    """What a rank holds of a weight while it is gathered: its own part, of each rank of the first dimension."""
    dtype = block._get_fsdp_state()._mp_policy.param_dtype or weight.dtype
    return weight.to_local().numel() * weight.device_mesh.size(0) * dtype.itemsize
