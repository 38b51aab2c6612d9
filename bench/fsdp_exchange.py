"""What FSDP2's exchanges cost the computation beside them, and what sending them in other ways would give.

The loop by hand of bench/llama.py, on all GPUs of one host, in ways that are switched between steps:

- nccl: as torch sends them: kernels that take multiprocessors from the computation;
- kept: gathered weights stay from forward to backward;
- pulled weights: each GPU's copy engines fetch the other parts from symmetric memory; no kernel but a barrier's;
- pulled gradients: fetched the same way as bf16, in which backward makes them, and added up in float32: half the bytes
  of float32 gradients, and the same sums but for their order;
- symmetric: torch's `SymmMemAllGather`, beside NCCL's zero-CTA policy.

Each start measures some ways against "nccl" by turns; a start that hangs tells where, and the others go on. It decides
what hotloop does, and is no figure of hotloop's: nothing is recorded. On CPUs it shows that the first two run.
"""

import argparse
import faulthandler
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed._symmetric_memory as symmetric
from llama import ByHand, Sizes
from record import add_device
from torch import Tensor, distributed, multiprocessing
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

_LIMIT_SECONDS = 120


@dataclass(frozen=True)
class Start:
    """Ways that one set of processes is measured with.

    Attributes:
        variables: of the environment, which NCCL reads when it starts.
        zero_ctas: NCCL's zero-CTA policy.
    """

    ways: tuple[str, ...]
    variables: tuple[tuple[str, str], ...] = ()
    zero_ctas: bool = False


STARTS = {
    "nccl": Start(("nccl", "kept")),
    "few": Start(("nccl", "kept"), (("NCCL_MAX_CTAS", "8"),)),
    "pulled weights": Start(("nccl", "pulled weights", "pulled weights, kept")),
    "pulled": Start(("nccl", "pulled gradients", "pulled weights, pulled gradients, kept")),
    "symmetric": Start(("nccl", "symmetric", "symmetric, kept"), zero_ctas=True),
}


class Buffers:
    """Two in turns for each size, of memory that all ranks can read: one is fetched from while the next is filled."""

    def __init__(self, group: distributed.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._rings: dict[tuple[int, torch.dtype], list[tuple[Tensor, Any]]] = {}

    def next(self, numbers: int, dtype: torch.dtype) -> tuple[Tensor, Any]:
        ring = self._rings.setdefault((numbers, dtype), [])
        if len(ring) < 2:
            made = symmetric.empty(numbers, dtype=dtype, device=self._device)
            ring.append((made, symmetric.rendezvous(made, self._group.group_name)))
            return ring[-1]
        ring.reverse()
        return ring[1]


class PulledWeights(collectives.AllGather):
    """Each rank's part lies in its own buffer; the others fetch it from there."""

    def __init__(self, buffers: Buffers, rank: int, size: int) -> None:
        self._buffers, self._rank, self._size = buffers, rank, size
        self._handles: dict[int, Any] = {}

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        buffer, handle = self._buffers.next(int(size[0]), dtype)
        self._handles[buffer.data_ptr()] = handle
        return buffer

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: distributed.ProcessGroup, async_op: bool = False
    ) -> None:
        handle, numbers = self._handles[output_tensor.data_ptr()], input_tensor.numel()
        handle.barrier(channel=0)
        for peer in peers(self._rank, self._size):
            first = peer * numbers
            part = handle.get_buffer(peer, (numbers,), output_tensor.dtype, first)
            output_tensor[first : first + numbers].copy_(part)


class PulledGradients(collectives.ReduceScatter):
    """FSDP2 asks for what goes in, then for what comes out; the former is made bf16."""

    def __init__(self, buffers: Buffers, rank: int, size: int) -> None:
        self._buffers, self._rank, self._size = buffers, rank, size
        self._handles: dict[int, Any] = {}
        self._fetched: dict[int, Tensor] = {}
        self._is_output = False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self._is_output = not self._is_output
        if not self._is_output:
            return torch.empty(size, dtype=dtype, device=device)
        buffer, handle = self._buffers.next(int(size[0]), torch.bfloat16)
        self._handles[buffer.data_ptr()] = handle
        return buffer

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: distributed.ProcessGroup, op: Any,
        async_op: bool = False,
    ) -> None:  # fmt: skip
        handle, numbers = self._handles[input_tensor.data_ptr()], output_tensor.numel()
        if numbers not in self._fetched:
            self._fetched[numbers] = input_tensor.new_empty(self._size, numbers)
        fetched, first = self._fetched[numbers], self._rank * numbers
        handle.barrier(channel=0)
        for peer in peers(self._rank, self._size):
            fetched[peer].copy_(handle.get_buffer(peer, (numbers,), torch.bfloat16, first))
        fetched[self._rank].copy_(input_tensor[first : first + numbers])
        torch.sum(fetched, 0, dtype=torch.float32, out=output_tensor)
        output_tensor.mul_(1 / self._size)


def peers(rank: int, size: int) -> list[int]:
    """The others, each rank beginning with another one."""
    return [(rank + distance) % size for distance in range(1, size)]


class Loop(ByHand):
    """The same with ways to send."""

    def __init__(self, rank: int, sizes: Sizes) -> None:
        super().__init__(rank, sizes)
        buffers = Buffers(distributed.group.WORLD, self.device)
        self._pulled_weights = PulledWeights(buffers, rank, sizes.ranks)
        self._pulled_gradients = PulledGradients(buffers, rank, sizes.ranks)
        self._symmetric: Any = None

    def use(self, way: str) -> None:
        """Send so from now on."""
        gather: Any = self._pulled_weights if "pulled weights" in way else collectives.DefaultAllGather()
        if "symmetric" in way:
            self._symmetric = gather = self._symmetric or collectives.SymmMemAllGather(distributed.group.WORLD)
        scatter = self._pulled_gradients if "gradients" in way else collectives.DefaultReduceScatter()
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(gather)
                module.set_custom_reduce_scatter(scatter)
        for block in self.model.blocks:
            block.set_reshard_after_forward("kept" not in way, recurse=False)

    def gradients(self, way: str) -> list[Tensor]:
        """Of the first block and what is outside of blocks."""
        self.use(way)
        self.backward()
        named = self.model.named_parameters()
        found = [p.grad.to_local().clone() for name, p in named if "blocks" not in name or "blocks.0." in name]
        self.optimizer.zero_grad()
        return found


def rank_main(rank: int, sizes: Sizes, start: Start, port: int, steps: int, rounds: int) -> None:
    faulthandler.dump_traceback_later(_LIMIT_SECONDS - 15, exit=True)
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(sizes.ranks)}
    os.environ |= {**address, **dict(start.variables)}
    if sizes.device == "cuda":
        torch.cuda.set_device(rank)
        options = distributed.ProcessGroupNCCL.Options()
        if start.zero_ctas:
            options.config.cta_policy = distributed.ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO
        distributed.init_process_group("nccl", device_id=torch.device("cuda", rank), pg_options=options)
    else:
        distributed.init_process_group("gloo")

    def told(text: str) -> None:
        if rank == 0:
            print(f"{time.monotonic() - began:.1f} s: {text}", file=sys.stderr, flush=True)

    began = time.monotonic()
    loop = Loop(rank, sizes)
    for _ in range(3):
        loop.step()
    told("compiled")
    plain, again = loop.gradients("nccl"), loop.gradients("nccl")
    told(f"gradients differ by {difference(plain, again):.1e} from time to time")
    for way in start.ways[1:]:
        told(f"{way}: gradients differ by {difference(plain, loop.gradients(way)):.1e}")
    del plain, again
    rates: dict[str, list[float]] = {way: [] for way in start.ways}
    for _ in range(rounds):
        for way, found in rates.items():
            loop.use(way)
            loop.step()
            loop.step()
            found.append(loop.rate(steps))
            told(f"{way}: {found[-1]:.0f} tokens/s/GPU")
    if rank == 0:
        plain_rate = median(rates["nccl"])
        print(json.dumps({way: [round(median(each)), median(each) / plain_rate] for way, each in rates.items()}))
    distributed.destroy_process_group()


def difference(ones: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """The largest, as a share of the largest number in its tensor."""
    pairs = zip(ones, others, strict=True)
    return max(((one - other).abs().max() / one.abs().max()).item() for one, other in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_device(parser)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", nargs="*", choices=STARTS, default=list(STARTS))
    arguments = parser.parse_args()
    sizes = Sizes(arguments.device, arguments.layers)
    for number, name in enumerate(arguments.only):
        if sizes.device == "cpu" and name != "nccl":
            continue
        print(f"{name}:", file=sys.stderr, flush=True)
        given = (sizes, STARTS[name], 29_700 + number, arguments.steps, arguments.rounds)
        try:
            multiprocessing.spawn(rank_main, given, nprocs=sizes.ranks)
        except (multiprocessing.ProcessRaisedException, multiprocessing.ProcessExitedException) as error:
            print(f"{name}: {str(error)[-1500:]}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
