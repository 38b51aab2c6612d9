"""How much arithmetic a model needs, and how fast the device multiplies matrices: together, the MFU."""

import copy
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from hotloop.data.dataset import Dataset, sample_fields
from hotloop.tasks.task import RANDOM, Task, Tensors
from hotloop.train.blocks import are_alike, repeated_blocks, skip
from hotloop.train.random_state import drawn_from, untouched_generators

_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Arithmetic:
    """What the speed of a training is measured against.

    Attributes:
        flops_per_sample: forward and backward, as the model is defined; recomputation does not count. 0: not known.
        matrix_rate: FLOP/s of a large matrix product in the training's precision, measured. 0: not known.
    """

    flops_per_sample: float = 0.0
    matrix_rate: float = 0.0

    def rate(self, samples_per_second: float) -> float:
        """The model's FLOP/s."""
        return self.flops_per_sample * samples_per_second

    def mfu(self, samples_per_second: float) -> float:
        """Share of the matrix rate that the model's FLOP/s are, 0 to 1; 0 if not known."""
        return self.rate(samples_per_second) / self.matrix_rate if self.matrix_rate else 0.0


def flops_per_sample(task: Task, dataset: Dataset, seed: int) -> float:
    """FLOP of matrix products, convolutions and attention for one sample, forward and backward; 0 if not known.

    Counted on tensors without data (torch's "meta" device): nothing is computed and no memory taken. Attention counts
    in full, masked or not.
    """
    samples = 2  # batch normalisation needs more than one
    task = copy.copy(task)  # what it caches on the way is of no use elsewhere
    try:
        with untouched_generators(), drawn_from(seed), torch.device("meta"):
            model = task.model()
            fields = sample_fields(dataset, seed)
            batch = {
                name: torch.empty((samples, *field.shape), dtype=getattr(torch, field.dtype.name))
                for name, field in fields.items()
            }
            if task.random_numbers:
                batch[RANDOM] = torch.empty(samples, task.random_numbers)
            return _of_all_blocks(task, model, batch) / samples
    except Exception:  # a model that needs real numbers to run: its FLOPs stay unknown, nothing else
        return 0.0


def _of_all_blocks(task: Task, model: nn.Module, batch: Tensors) -> float:
    """Of blocks that are alike one more tells what each costs: 1.3 s less for Llama's 32."""
    blocks = repeated_blocks(model)
    if are_alike(blocks):
        try:
            skip(blocks[2:])
            two = _count(task, model, batch)
            skip(blocks[1:])
            one = _count(task, model, batch)
            return one + (len(blocks) - 1) * (two - one)
        except Exception:  # blocks that give more than what they are given first
            for block in blocks[1:]:
                block.__dict__.pop("forward", None)
    return _count(task, model, batch)


def _count(task: Task, model: nn.Module, batch: Tensors) -> float:
    with FlopCounterMode(display=False) as counter:
        ready = task.prepare(batch, training=True)
        ready = {name: part.float() if part.is_floating_point() else part for name, part in ready.items()}
        task.loss(task.forward(model, ready), ready).backward()  # type: ignore[no-untyped-call]
    return float(counter.get_total_flops())


def matrix_rate(device: torch.device, precision: str, largest: int = 8192) -> float:
    """FLOP/s of a matrix product in the given precision: of `largest`³ on a GPU, of 1024³ on a CPU.

    Takes about 50 ms, on a CPU 0.1 s once in a process. Of 4096³ where less than 8 GB is free: the larger matrices take
    0.75 GiB.
    """
    dtype = _DTYPES.get(precision, torch.bfloat16)
    if device.type == "cpu":
        return _cpu_rate(dtype, torch.get_num_threads())
    size = largest if torch.cuda.mem_get_info(device)[0] > 8e9 else 4096
    a, b = _matrices(size, dtype, device)
    with torch.cuda.device(device):  # events belong to the current one
        return 2 * size**3 / statistics.median([_seconds_on_gpu(a, b) for _ in range(7)][2:])


@cache
def _cpu_rate(dtype: torch.dtype, threads: int) -> float:
    """Of so many threads, which torch has now."""
    size = 1024
    return 2 * size**3 / min(_seconds_on_cpu(*_matrices(size, dtype, torch.device("cpu"))))


def _matrices(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    own = torch.Generator(device).manual_seed(0)  # a training that is measured draws the same numbers as another
    return torch.randn(2, size, size, device=device, generator=own).to(dtype)


def _seconds_on_cpu(a: torch.Tensor, b: torch.Tensor) -> Iterator[float]:
    """The fastest counts: what else runs on a CPU slows some of them.

    In fp32 also as a convolution, which is oneDNN's: MKL's products have half of its FLOP/s on an AMD processor (222
    and 426 GFLOP/s on two cores), and a training was faster than what it was measured against.
    """
    products: list[Callable[[], torch.Tensor]] = [partial(torch.matmul, a, b)]
    if a.dtype == torch.float32:
        pixels = a.view(1, len(a), -1, 32).contiguous(memory_format=torch.channels_last)
        weights = b.view(*b.shape, 1, 1).contiguous(memory_format=torch.channels_last)
        products.append(partial(torch.conv2d, pixels, weights))
    for product in products:
        for _ in range(4):
            started = time.perf_counter()
            product()
            yield time.perf_counter() - started


def _seconds_on_gpu(a: torch.Tensor, b: torch.Tensor) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    a @ b
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000
