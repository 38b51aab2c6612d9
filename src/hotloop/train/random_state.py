"""Seeds, and the random states that a checkpoint keeps (dropout draws from them; data does not)."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


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


def random_state() -> dict[str, Any]:
    """The same as `torch.load(weights_only=True)` can read it."""
    python, (name, keys, position, has_gauss, cached), cpu, cuda = generators()
    keys = torch.from_numpy(np.array(keys, dtype=np.int64))
    return {"python": python, "numpy": (name, keys, position, has_gauss, cached), "torch": cpu, "cuda": cuda}


def restore_random_state(state: dict[str, Any]) -> None:
    """Continue from `random_state()`; call it just before the next batch, not before what else draws."""
    version, keys, gauss = state["python"]
    name, words, position, has_gauss, cached = state["numpy"]
    numpy = name, words.numpy().astype(np.uint32), position, has_gauss, cached
    restore_generators(((version, tuple(keys), gauss), numpy, state["torch"], state["cuda"]))


@contextmanager
def drawn_from(seed: int) -> Iterator[None]:
    """Let torch's CPU random numbers in this block depend on `seed` alone, and leave no trace after it."""
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before)
