"""Divided weights that stay gathered between forward and backward."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from hotloop.train.gathered import ROOM, Gathered

WINDOWS = 12


@pytest.fixture
def alone() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)), nn.Linear(8, 1))


def trained(model: nn.Module, gathered: Gathered | None = None) -> list[Tensor]:
    """Weights after some steps, an evaluation after each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    chance = torch.Generator().manual_seed(1)
    for _ in range(WINDOWS):
        model(torch.rand(4, 8, generator=chance)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if gathered:
            gathered.window_done()
        with torch.no_grad():
            model(torch.ones(1, 8))
    weights = model.state_dict().values()
    return [weight.full_tensor() if isinstance(weight, DTensor) else weight for weight in weights]


@pytest.mark.parametrize(("free", "kept"), [(-2, False), (2, True)])
def test_weights_stay_gathered_where_there_is_room_and_learn_the_same(alone: None, free: int, kept: bool) -> None:
    expected, told = trained(made()), list[str]()
    model = made()
    for block in model[:3]:
        fully_shard(block)
    fully_shard(model)
    more, peak = 3 * (8 * 8 + 8) * 4, 1000
    gathered = Gathered(model, told.append, lambda device: (peak, round((peak + more) / ROOM) + free))
    found = trained(model, gathered)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert len(told) == kept
    model(torch.ones(1, 8))
    whole = [not isinstance(weight, DTensor) for block in model[:3] for weight in block.parameters()]
    assert all(whole) if kept else not any(whole)
    assert all(isinstance(weight, DTensor) for weight in model.state_dict().values()), "what is saved is divided"


def test_in_sixteen_bits_half_as_much_has_to_fit(alone: None) -> None:
    model, told = made(), list[str]()
    for part in (*model[:3], model):
        fully_shard(part, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    trained(model, Gathered(model, told.append, lambda device: (0, round(3 * (8 * 8 + 8) * 2 / ROOM) + 1)))
    assert len(told) == 1


def test_a_block_within_a_block_counts_once(alone: None) -> None:
    model, told = made(), list[str]()
    fully_shard(model[0][0])
    fully_shard(model[0])
    fully_shard(model)
    trained(model, Gathered(model, told.append, lambda device: (0, round((8 * 8 + 8) * 4 / ROOM) + 1)))
    assert len(told) == 1


def test_weights_that_are_copied_to_all_ranks_are_left_alone(alone: None) -> None:
    model, told = made(), list[str]()
    replicate(model[0])
    replicate(model)
    trained(model, Gathered(model, told.append, lambda device: (0, 1 << 30)))
    assert not told
