"""Models of which the first rank alone makes the numbers."""

import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh

from hotloop.core.errors import InputError
from hotloop.tasks.task import Task
from hotloop.tasks.transformers import build_decoder
from hotloop.train.outline import fill, is_outline, outline
from hotloop.train.sharded import Types, divide, whole


class Buffered(nn.Module):
    """With buffers of several types, of which a checkpoint has some, and a weight that does not learn."""

    def __init__(self, named: str = "seen") -> None:
        super().__init__()
        self.linear = nn.Linear(3, 5)
        self.linear.bias.requires_grad_(False)
        self.register_buffer(named, torch.tensor(7, dtype=torch.int16))
        self.register_buffer("turns", torch.full((3, 2), 1 + 2j))
        self.register_buffer("angles", torch.arange(4.0), persistent=False)
        self.register_buffer("mask", torch.ones(3, 3, dtype=torch.bool).tril())


def decoder(name: str) -> nn.Module:
    sizes = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 4 if name == "gpt2" else 2, "hidden": 64}
    return build_decoder(name, 50, 8, sizes)


def outlined(make: Callable[[], nn.Module]) -> nn.Module:
    return outline(cast(Task, SimpleNamespace(model=make)))


@pytest.fixture
def alone() -> Iterator[Any]:
    """A mesh of this process."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "tensor"))
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("make", [Buffered, lambda: decoder("gpt2"), lambda: decoder("llama-3-8b")])
def test_a_filled_outline_is_the_model(make: Callable[[], nn.Module], alone: Any) -> None:
    """gpt2's first and last layer have the same weight, and keep it."""
    torch.manual_seed(0)
    expected = make()
    model = outlined(make)
    assert is_outline(model)
    divide(model, alone, Types(), layers=False)
    fill(model, expected, "cpu")
    assert not is_outline(model)
    found = whole({**model.state_dict(), **dict(model.named_buffers())})
    own: dict[str, Tensor] = {**expected.state_dict(), **dict(expected.named_buffers())}
    assert found.keys() == own.keys()
    assert all(torch.equal(found[name], own[name]) for name in own)
    learnt = [(name, one.requires_grad) for name, one in model.named_parameters()]
    assert learnt == [(name, one.requires_grad) for name, one in expected.named_parameters()]


@pytest.mark.parametrize("other", [lambda: Buffered("heard"), lambda: nn.Linear(3, 5), lambda: Buffered().double()])
def test_another_model_than_the_outline_is_refused(other: Callable[[], nn.Module], alone: Any) -> None:
    model = outlined(Buffered)
    divide(model, alone, Types(), layers=False)
    with pytest.raises(InputError, match="has other weights or buffers on torch's meta device"):
        fill(model, other(), "cpu")


def test_an_outline_draws_nothing() -> None:
    def make() -> nn.Module:
        random.random(), np.random.rand()
        return nn.Sequential(nn.Linear(2, 2), nn.Dropout(float(torch.rand(1, device="cpu"))))

    def drawn(outlined_before: bool) -> list[float]:
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(3)
        if outlined_before:
            outlined(make)
        return [random.random(), np.random.rand(), torch.rand(1).item()]

    assert drawn(True) == drawn(False)
