"""Divided weights that stay gathered from a block's forward pass to its backward, where memory is left for them.

Else each is gathered twice a step. Llama 3's 8B shapes on four H200s, 8,192 tokens each: 9,830 tokens/s/GPU instead of
9,630, with 9 GiB more (bench/llama.py's loop by hand).
"""

from collections.abc import Callable

import torch
from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule

from hotloop.core.units import format_bytes

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
        model: divided by `fully_shard`, its blocks each by itself.
        precision: of the step, by which weights are gathered in 16 bits or as they are.
        notify: told, in a line, that they are kept.
        memory: the most that was taken, and all that there is, in bytes.
    """

    def __init__(
        self, model: nn.Module, precision: str, notify: Callable[[str], None],
        memory: Callable[[torch.device], tuple[int, int]] = gpu_memory,
    ) -> None:  # fmt: skip
        self._blocks = [part for part in model.modules() if isinstance(part, FSDPModule) and part is not model]
        self._halved = precision in ("bf16", "float8")
        self._notify, self._memory = notify, memory
        self._left = _AFTER if self._blocks else 0

    def window_done(self) -> None:
        """Count a window; all ranks do so alike."""
        if self._left:
            self._left -= 1
            if not self._left:
                self._decide()

    def _decide(self) -> None:
        weights = {weight for block in self._blocks for weight in block.parameters()}
        device = next(iter(weights)).device
        more = sum(weight.numel() * (2 if self._halved else weight.element_size()) for weight in weights)
        peak, total = self._memory(device)
        all_have = torch.tensor(int(has_room(peak, more, total)), device=device)
        distributed.all_reduce(all_have, op=distributed.ReduceOp.MIN)
        if all_have.item():
            for block in self._blocks:
                block.set_reshard_after_forward(False, recurse=False)
            self._notify(f"memory is left: blocks keep {format_bytes(more)} of gathered weights until backward")
