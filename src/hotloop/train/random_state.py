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


def random_state() -> dict[str, Any]:
    """The states of this process's generators and that of its GPU, as `torch.load(weights_only=True)` can read them."""
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.array(keys, dtype=np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [],  # type: ignore[no-untyped-call]
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Continue from `random_state()`; call it just before the next batch, not before what else draws."""
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    name, words, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, words.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"][0])


@contextmanager
def drawn_from(seed: int) -> Iterator[None]:
    """Let torch's CPU random numbers in this block depend on `seed` alone, and leave no trace after it."""
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before)
