"""Divided weights that are updated while backward still computes."""

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_flatten

from hotloop.core.errors import HotloopError
from hotloop.train.early_update import EarlyUpdate
from hotloop.train.local_update import LocalUpdate

WINDOWS = 5


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


class Net(nn.Module):
    """Blocks, and a layer outside of them; some may be left out, or run twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(8, 1)
        self.order = [0, 1, 2]

    def forward(self, x: Tensor) -> Tensor:
        for number in self.order:
            x = self.blocks[number](x)
        result: Tensor = self.head(x)
        return result


def divided() -> Net:
    model = Net()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


class Training:
    """Windows of two batches, and how many weights are left for their ends."""

    def __init__(self, model: Net, optimizer: Optimizer, early: bool = True) -> None:
        self.model, self.optimizer = model, optimizer
        self.early = EarlyUpdate(model, optimizer) if early else None
        self._chance = torch.Generator().manual_seed(1)

    def window(self, passes: int = 1) -> int:
        for last in (False, True):
            with self.early.backward(last) if self.early else nullcontext():
                for _ in range(passes):
                    self.model(torch.rand(4, 8, generator=self._chance)).square().mean().backward()
        left = sum(weight.grad is not None for weight in self.model.parameters())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return left

    def weights(self) -> list[Tensor]:
        values = self.model.state_dict().values()
        return [value.full_tensor() if isinstance(value, DTensor) else value for value in values]


def adamw(model: nn.Module) -> Optimizer:
    groups = [
        {"params": [weight for weight in model.parameters() if (weight.ndim > 1) is matrix]} for matrix in (True, False)
    ]
    return torch.optim.AdamW([groups[0], {**groups[1], "weight_decay": 0.0}], lr=0.1)


def trained(early: bool, orders: dict[int, list[int]] | None = None) -> tuple[list[Tensor], list[int]]:
    model = divided()
    training, left = Training(model, adamw(model), early), []
    for window in range(WINDOWS):
        model.order = (orders or {}).get(window, model.order)
        left.append(training.window())
    return training.weights(), left


def test_they_learn_the_same_and_nothing_is_left_for_the_end() -> None:
    (found, left), (expected, _) = trained(True), trained(False)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert left == [8, 8, 0, 0, 0], "in the first windows it is only seen that gradients come once"


def as_plain(tree: Any) -> list[Any]:
    return [one.full_tensor() if isinstance(one, DTensor) else one for one in tree_flatten(tree)[0]]


OPTIMIZERS: list[Callable[[nn.Module], Optimizer]] = [
    adamw,
    lambda model: torch.optim.Adam(model.parameters(), lr=0.1, amsgrad=True, fused=True),
    lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_what_the_optimizer_remembers_its_settings_and_a_state_that_is_loaded_count(
    make: Callable[[nn.Module], Optimizer],
) -> None:
    """Of early updates as of others: learning rates change, one weight decays, and the third window is repeated."""

    def states(early: bool) -> list[Any]:
        model = divided()
        training, seen = Training(model, make(model), early), list[Any]()
        kept: Any = None
        for window in range(WINDOWS + 2):
            training.optimizer.param_groups[0]["lr"] = 0.1 / (1 + window)
            training.optimizer.param_groups[-1]["weight_decay"] = 0.01 * window
            if window == 3:
                weights, remembered = kept
                model.load_state_dict(weights)
                training.optimizer.load_state_dict(remembered)
            left = training.window()
            assert left == (8 if window < 2 or not early else 0), window
            if window == 2:
                kept = copy.deepcopy((model.state_dict(), training.optimizer.state_dict()))
            seen += [training.weights(), training.optimizer.state_dict()]
        return as_plain(seen)

    found, expected = states(True), states(False)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


def momentum_in_one_group(model: nn.Module) -> Optimizer:
    weights = list(model.parameters())
    return torch.optim.SGD([{"params": weights[:3], "momentum": 0.9}, {"params": weights[3:]}], lr=0.1)


def clear_all(optimizer: Optimizer) -> None:
    optimizer.state.clear()


def clear_each(optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        state.clear()


def replace_moments(optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        state |= {name: torch.zeros_like(value) for name, value in state.items() if name != "step"}


def give_momentum(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        group["momentum"] = 0.5


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (adamw, clear_all), (adamw, clear_each), (adamw, replace_moments),
        (OPTIMIZERS[3], give_momentum), (momentum_in_one_group, give_momentum), (momentum_in_one_group, clear_all),
    ],
)  # fmt: skip
def test_what_a_user_makes_the_optimizer_forget_or_remember_counts(
    make: Callable[[nn.Module], Optimizer], change: Callable[[Optimizer], None]
) -> None:
    def states(early: bool) -> list[Any]:
        model = divided()
        training = Training(model, make(model), early)
        for window in range(WINDOWS + 2):
            if window == 3:
                change(training.optimizer)
            left = training.window()
        assert left == (0 if early else 8)
        return as_plain([training.weights(), training.optimizer.state_dict()])

    found, expected = states(True), states(False)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


def test_what_updates_a_block_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, make = list[int](), LocalUpdate._made
    monkeypatch.setattr(LocalUpdate, "_made", lambda self, found: made.append(1) or make(self, found))
    assert trained(True)[1][-1] == 0
    assert len(made) == 4, "three blocks, and what is outside of them"


def test_a_block_that_is_left_out_is_not_updated() -> None:
    orders = {3: [0, 2], 4: [0, 1, 2]}
    (found, left), (expected, _) = trained(True, orders), trained(False, orders)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert left[2:] == [0, 0, 0]


def test_a_block_that_runs_twice_is_updated_once() -> None:
    orders = {2: [0, 1, 1, 2]}
    (found, left), (expected, _) = trained(True, orders), trained(False, orders)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert left[2:] == [0, 0, 0]


def test_gradients_that_come_twice_in_a_step_are_left_for_its_end() -> None:
    """As of a loss that has a part of it worked out by itself."""
    model, other = divided(), divided()
    training, plain = Training(model, adamw(model)), Training(other, adamw(other), early=False)
    assert [training.window(passes=2) for _ in range(WINDOWS)] == [8] * WINDOWS
    assert [plain.window(passes=2) for _ in range(WINDOWS)] == [8] * WINDOWS
    assert all(torch.equal(one, other) for one, other in zip(training.weights(), plain.weights(), strict=True))


def test_gradients_that_begin_to_come_twice_are_an_error_not_another_update() -> None:
    model = divided()
    training = Training(model, adamw(model))
    assert [training.window() for _ in range(3)] == [8, 8, 0]
    with pytest.raises(HotloopError, match="have come twice in one step"):
        training.window(passes=2)


def test_what_is_called_at_each_step_of_the_optimizer_is_called_once() -> None:
    model = divided()
    training, calls = Training(model, adamw(model)), list[int]()
    handle = register_optimizer_step_post_hook(lambda optimizer, arguments, named: calls.append(1))
    try:
        assert [training.window() for _ in range(WINDOWS)] == [8] * WINDOWS
    finally:
        handle.remove()
    assert len(calls) == WINDOWS


def test_an_optimizer_that_may_look_at_all_weights_has_all_gradients() -> None:
    class Own(torch.optim.SGD):
        """A class of the user's."""

    model = divided()
    training = Training(model, Own(model.parameters(), lr=0.1))
    assert [training.window() for _ in range(WINDOWS)] == [8] * WINDOWS


def test_a_model_that_is_not_divided_is_left_alone() -> None:
    model = Net()
    training = Training(model, adamw(model))
    assert [training.window() for _ in range(WINDOWS)] == [8] * WINDOWS
