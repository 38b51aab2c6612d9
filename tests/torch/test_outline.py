"""Models of which the first rank alone makes the numbers."""

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh

from hotloop.tasks.task import Task
from hotloop.tasks.transformers import build_decoder
from hotloop.train.outline import fill, is_outline, outline
from hotloop.train.sharded import Types, divide, whole


class Rates(nn.Module):
    """With a number that it computes from a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = torch.linspace(0, 1, 3)[1].item()


class Aside(nn.Module):
    """With a tensor where `Module.to` does not find it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.kept = SimpleNamespace(mask=torch.ones(3))


class Buffered(nn.Module):
    """With buffers, of which a checkpoint has one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 5)
        self.register_buffer("seen", torch.tensor(7))
        self.register_buffer("angles", torch.arange(4.0), persistent=False)


def task_of(make: Callable[[Any], nn.Module]) -> Task:
    return cast(Task, SimpleNamespace(make=make))


def outlined(make: Callable[[Any], nn.Module]) -> nn.Module | None:
    return outline(task_of(make), lambda task: cast(Any, task).make(task))


@pytest.mark.parametrize(
    ("make", "can"), [(Buffered, True), (lambda: nn.Linear(2, 2), True), (Rates, False), (Aside, False)]
)
def test_what_needs_numbers_is_made_with_them(make: Callable[[], nn.Module], can: bool) -> None:
    found = outlined(lambda task: make())
    assert (found is not None and is_outline(found)) == can
    assert not is_outline(make())


def test_a_task_that_keeps_numbers_of_its_model_gets_them() -> None:
    def make(task: Any) -> nn.Module:
        task.model = nn.Linear(2, 2)
        task.scale = torch.ones(2)
        return cast(nn.Module, task.model)

    task = task_of(make)
    assert outline(task, lambda trial: make(trial)) is None
    assert set(vars(task)) == {"make"}, "nothing of the trial is left"


def test_what_a_task_keeps_of_its_outline_is_kept() -> None:
    def make(task: Any) -> nn.Module:
        task.width = 3
        return nn.Linear(2, task.width)

    task: Any = task_of(make)
    assert outline(task, make) is not None
    assert task.width == 3


def test_an_outline_draws_nothing() -> None:
    def make(task: Any) -> nn.Module:
        random.random(), np.random.rand()
        return nn.Sequential(nn.Linear(2, 2), nn.Dropout(float(torch.rand(1, device="cpu"))))

    drawn = [random.random(), np.random.rand(), torch.rand(1).item()]
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(3)
    expected = [random.random(), np.random.rand(), torch.rand(1).item()]
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(3)
    assert outlined(make) is not None
    assert [random.random(), np.random.rand(), torch.rand(1).item()] == expected != drawn


def decoder(name: str) -> nn.Module:
    sizes = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 4 if name == "gpt2" else 2, "hidden": 64}
    return build_decoder(name, 50, 8, sizes)


@pytest.mark.parametrize("make", [Buffered, lambda: decoder("gpt2"), lambda: decoder("llama-3-8b")])
def test_a_filled_outline_is_the_model(make: Callable[[], nn.Module]) -> None:
    """gpt2's first and last layer have the same weight: they still have after it."""
    torch.manual_seed(0)
    expected = make()
    model = outlined(lambda task: make())
    assert model is not None
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "tensor"))
        divide(model, mesh, Types(), layers=False)
        fill(model, expected, "cpu")
        assert not is_outline(model)
        found = whole({**model.state_dict(), **dict(model.named_buffers())})
        learnt = [(name, one.requires_grad) for name, one in model.named_parameters()]
    finally:
        distributed.destroy_process_group()
    own: dict[str, Tensor] = {**expected.state_dict(), **dict(expected.named_buffers())}
    assert found.keys() == own.keys()
    assert all(torch.equal(found[name], own[name]) for name in own)
    assert learnt == [(name, one.requires_grad) for name, one in expected.named_parameters()]
