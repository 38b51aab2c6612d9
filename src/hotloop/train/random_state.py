"""Seeds, and the random states that a checkpoint keeps (dropout draws from them; data does not)."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

_VERSION = 3
"""Of `random.getstate()`, since Python 3.2."""


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch, all devices."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def generators() -> tuple[Any, ...]:
    """The states of this process's generators, and that of its GPU: Python's, numpy's, torch's, CUDA's. Costs 30 µs."""
    cuda = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda


def restore_generators(states: tuple[Any, ...]) -> None:
    """Continue from `generators()`."""
    python, numpy, cpu, cuda = states
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    if cuda and torch.cuda.is_available():
        torch.cuda.set_rng_state(cuda[0])


_STATE = np.dtype(
    [
        ("python", "<u4", 625), ("python_has_gauss", "?"), ("python_gauss", "<f8"),
        ("numpy", "<u4", 624), ("numpy_position", "<u4"), ("numpy_has_gauss", "?"), ("numpy_gauss", "<f8"),
        ("torch", "u1", 5056), ("has_cuda", "?"), ("cuda", "u1", 16),
    ]
)  # fmt: skip
"""Of one process, in a checkpoint: bytes, as all ranks send theirs to the first at every save, which takes in those of
1,024 in 0.05 s, and took 0.63 s for as many numbers (bench/scale.py)."""


def random_state() -> bytes:
    """`generators()` in 10 kB."""
    (_, words, gauss), (_, keys, position, has_gauss, cached), cpu, cuda = generators()
    state = np.zeros((), _STATE)
    state["python"], state["python_has_gauss"], state["python_gauss"] = words, gauss is not None, gauss or 0.0
    state["numpy"], state["numpy_position"] = keys, position
    state["numpy_has_gauss"], state["numpy_gauss"] = has_gauss, cached
    state["torch"], state["has_cuda"] = cpu.numpy(), bool(cuda)
    if cuda:
        state["cuda"] = cuda[0].numpy()
    return state.tobytes()


def stacked(states: Sequence[bytes]) -> Tensor:
    """Those of all ranks as a checkpoint keeps them: uint8 (ranks, bytes)."""
    return torch.frombuffer(bytearray(b"".join(states)), dtype=torch.uint8).view(len(states), -1)


def restore_random_state(state: Tensor) -> None:
    """Continue from a row of `stacked`; call it just before the next batch, not before what else draws."""
    found = np.frombuffer(state.numpy().tobytes(), _STATE)[0]
    gauss = float(found["python_gauss"]) if found["python_has_gauss"] else None
    python = _VERSION, tuple(found["python"].tolist()), gauss
    position, has_gauss = int(found["numpy_position"]), int(found["numpy_has_gauss"])
    numpy = "MT19937", found["numpy"], position, has_gauss, float(found["numpy_gauss"])
    cuda = [torch.from_numpy(found["cuda"].copy())] if found["has_cuda"] else []
    restore_generators((python, numpy, torch.from_numpy(found["torch"].copy()), cuda))


@contextmanager
def untouched_generators() -> Iterator[None]:
    """Let what is drawn in this block leave no trace after it, in any of `generators()`."""
    states = generators()
    try:
        yield
    finally:
        restore_generators(states)


@contextmanager
def drawn_from(seed: int) -> Iterator[None]:
    """Let torch's CPU random numbers in this block depend on `seed` alone, and leave no trace after it."""
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before)
