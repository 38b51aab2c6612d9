import copy
import math
from collections import UserDict
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import cnn
from torch import Tensor, nn
from torch.nn import functional

from hotloop import HotloopError, InputError, Step, StepSettings
from hotloop.train.flat import FlatGradients
from hotloop.train.padding import pad
from hotloop.train.pieces import Pieces, cut

Pair = tuple[Tensor, Tensor]


def loss(model: nn.Module, batch: Pair) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def batches(sizes: list[int], seed: int = 0) -> list[Pair]:
    random = torch.Generator().manual_seed(seed)
    return [(torch.randn(n, 3, 8, 8, generator=random), torch.randint(0, 2, (n,), generator=random)) for n in sizes]


def linear(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 2))


def sgd(model: nn.Module, rate: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_a_step_is_the_plain_loops_bit_for_bit() -> None:
    torch.manual_seed(0)
    model = cnn()
    plain = copy.deepcopy(model)
    step, optimizer = Step(model, loss, sgd(model)), sgd(plain)
    for batch in batches([8] * 5):
        mine = step(batch)
        optimizer.zero_grad()
        theirs = loss(plain, batch)
        theirs.backward()
        optimizer.step()
        assert torch.equal(mine, theirs.detach())
    assert torch.equal(weights(model), weights(plain))


def test_a_short_window_weighs_each_sample_the_same() -> None:
    """Batches of 8, 8 and 3 give the gradient of one batch of 19."""
    parts = batches([8, 8, 3])
    whole = (torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts]))
    accumulated, at_once = linear(), linear()
    step, other = Step(accumulated, loss, sgd(accumulated)), Step(at_once, loss, sgd(at_once))
    shares = [step(part, share=len(part[1]) / 19, last=number == 2) for number, part in enumerate(parts)]
    total = other(whole)
    assert sum(shares).item() == pytest.approx(total.item(), rel=1e-6)
    assert torch.allclose(weights(accumulated), weights(at_once), atol=1e-6)
    assert step.number == 1


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_clipping_bounds_the_unscaled_gradient(precision: str) -> None:
    model = linear()
    before = weights(model)
    step = Step(
        model, loss, torch.optim.SGD(model.parameters(), lr=1.0), settings=StepSettings(precision, clip_norm=0.01)
    )
    step(batches([8])[0])
    assert (weights(model) - before).norm().item() == pytest.approx(0.01, rel=1e-3)


def test_a_loss_that_overflows_fp16_gradients_is_skipped_and_the_scale_lowered() -> None:
    model = linear()
    before = weights(model)
    step = Step(model, lambda model, batch: 1e8 * loss(model, batch), sgd(model), settings=StepSettings("fp16"))
    scale = step.scale
    value = step(batches([8])[0])
    assert torch.isfinite(value)
    assert torch.equal(weights(model), before)
    assert (step.skipped, step.number) == (1, 1)
    assert step.scale == scale / 2


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precisions_learn_the_same(precision: str) -> None:
    batch = batches([32])[0]
    ends = []
    for kind in ("fp32", precision):
        model = linear()
        step = Step(model, loss, sgd(model, 0.01), settings=StepSettings(kind))
        values = [step(batch).item() for _ in range(20)]
        ends.append(values[-1])
        assert values[-1] < 0.5 * values[0]
    assert ends[1] == pytest.approx(ends[0], abs=0.05)


def test_the_schedule_sets_the_rate_of_every_group_and_steps_count_windows() -> None:
    model = linear()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD([{"params": parameters[:1], "lr": 1.0}, {"params": parameters[1:], "lr": 0.1}])
    step = Step(model, loss, optimizer, schedule=lambda number: 1 / (number + 1))
    rates = []
    for number, batch in enumerate(batches([4] * 4)):
        step(batch, share=0.5, last=number % 2 == 1)
        if number % 2:
            rates.append([group["lr"] for group in optimizer.param_groups])
    assert rates == [[1.0, 0.1], [0.5, 0.05]]
    assert step.learning_rate == pytest.approx(1 / 3)


def test_averaged_weights_follow_their_formula() -> None:
    model = cnn()
    step = Step(model, loss, sgd(model), settings=StepSettings(ema=0.9))
    assert step.averaged is not None
    expected = None
    for batch in batches([8] * 4):
        step(batch)
        expected = weights(model) if expected is None else 0.9 * expected + 0.1 * weights(model)
        assert torch.allclose(weights(step.averaged), expected, atol=1e-6)
    assert int(step.averaged[1].num_batches_tracked) > 0


@pytest.mark.parametrize(
    "settings", [StepSettings(), StepSettings("fp16", clip_norm=1.0, ema=0.9), StepSettings("bf16")]
)
def test_a_step_continues_from_its_state_bit_for_bit(settings: StepSettings) -> None:
    data = batches([8] * 6)

    def fresh() -> Step:
        torch.manual_seed(0)
        model = cnn()
        return Step(model, loss, sgd(model), schedule=lambda number: 0.9**number, settings=settings)

    through, first, second = fresh(), fresh(), fresh()
    for batch in data:
        through(batch)
    for batch in data[:3]:
        first(batch)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for batch in data[3:]:
        second(batch)
    assert torch.equal(weights(second.model), weights(through.model))
    if settings.ema:
        assert second.averaged is not None
        assert through.averaged is not None
        assert torch.equal(weights(second.averaged), weights(through.averaged))
    assert (second.number, second.scale) == (through.number, through.scale)


class Encoding(UserDict[str, Any]):
    """A batch as tokenizers give it."""

    def __getattr__(self, name: str) -> Any:
        return self.data[name]


def test_pieces_are_of_the_batchs_kind() -> None:
    batch = Encoding(ids=torch.arange(5), more={"mask": torch.ones(5)})
    pieces = [piece for piece, _ in cut(batch, 2)]
    assert [piece.ids.tolist() for piece in pieces] == [[0, 1], [2, 3, 4]]
    assert [len(piece.more["mask"]) for piece in pieces] == [2, 3]
    assert len(batch.ids) == 5
    nested = {"inputs": {"ids": torch.arange(4)}}
    assert [piece["inputs"]["ids"].tolist() for piece, _ in cut(nested, 2)] == [[0, 1], [2, 3]]


def test_a_batch_that_cannot_be_cut_is_named() -> None:
    def full(model: nn.Module, batch: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    model = linear()
    with pytest.raises(HotloopError, match="a SimpleNamespace, which cannot be cut into pieces"):
        Step(model, full, sgd(model))(SimpleNamespace(images=torch.ones(4)))


@pytest.mark.parametrize("window", [1, 2])
def test_gradients_that_others_left_are_not_trained_on(window: int) -> None:
    data = batches([8] * 4)
    ends = []
    for meddles in (False, True):
        torch.manual_seed(0)
        model = cnn()
        step = Step(model, loss, sgd(model))
        for number, batch in enumerate(data):
            if meddles and number % window == 0:  # to look at a gradient, before the first step and between steps
                loss(model.eval(), data[0]).backward()
                model.train()
            step(batch, share=1 / window, last=number % window == window - 1)
        ends.append(weights(model))
    assert torch.equal(*ends)


def foreign(model: nn.Module) -> torch.optim.Optimizer:
    return sgd(linear())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda model: "sgd", "the optimizer is a str"),
        (lambda model: torch.optim.SGD, "the optimizer is SGD"),
        (lambda model: torch.optim.LBFGS(model.parameters()), "LBFGS"),
        (foreign, "SGD, has none of the model's weights"),
    ],
)
def test_an_optimizer_that_cannot_train_the_model_is_refused(make: Callable[[nn.Module], Any], words: str) -> None:
    model = linear()
    with pytest.raises(InputError, match=words):
        Step(model, loss, make(model))


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "bfloat16"},
        {"compile": True},
        {"compile": "block"},
        {"clip_norm": -1.0},
        {"clip_norm": math.nan},
        {"ema": 1.0},
        {"ema": -0.1},
        {"pad_to": -8},
    ],
)
def test_settings_that_mean_nothing_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(changes))):
        StepSettings(**changes)


def test_float8_of_a_model_without_it_is_refused() -> None:
    model = linear()
    with pytest.raises(InputError, match="no layer of the model multiplies in float8"):
        Step(model, loss, sgd(model), settings=StepSettings("float8"))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda value: value.detach(), "no gradient"),
        (lambda value: value.long(), "no gradient"),
        (lambda value: value * (1 + 1j), "complex"),
    ],
)
def test_a_loss_that_trains_nothing_is_refused(make: Callable[[Tensor], Tensor], words: str) -> None:
    model = linear()
    step = Step(model, lambda model, batch: make(loss(model, batch)), sgd(model))
    with pytest.raises(HotloopError, match=words):
        step(batches([4])[0])


def test_a_loss_that_is_no_scalar_is_refused() -> None:
    model = linear()
    step = Step(
        model, lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1], reduction="none"), sgd(model)
    )
    with pytest.raises(HotloopError, match=r"the loss has shape \(8,\)"):
        step(batches([8])[0])


def test_learning_goes_down() -> None:
    model = linear()
    step = Step(model, loss, sgd(model, 0.01))
    batch = batches([16])[0]
    values = [step(batch).item() for _ in range(10)]
    assert all(later < earlier for earlier, later in pairwise(values))


@pytest.mark.parametrize("steps_before", [0, 2])
def test_averages_asked_for_later_begin_with_the_loaded_weights(steps_before: int) -> None:
    data = batches([8] * 4)
    saved = cnn()
    without = Step(saved, loss, sgd(saved))
    for batch in data:
        without(batch)
    model = cnn()
    step = Step(model, loss, sgd(model), settings=StepSettings(ema=0.9))
    for batch in data[:steps_before]:
        step(batch)
    step.load_state_dict(without.state_dict())
    assert step.averaged is not None
    assert torch.equal(weights(step.averaged), weights(saved))
    step(data[0])
    assert torch.equal(weights(step.averaged), weights(model))  # the first update copies


def test_settings_changed_since_a_save_take_effect() -> None:
    def make(weight_decay: float, precision: str) -> Step:
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=weight_decay)
        return Step(model, loss, optimizer, lambda number: 0.5, StepSettings(precision))

    before, after = make(0.0, "fp32"), make(0.3, "fp16")
    before(batches([8])[0])
    after.load_state_dict(before.state_dict())
    after(batches([8])[0])
    assert after.optimizer.param_groups[0]["weight_decay"] == 0.3
    assert after.number == 2


CUBLAS = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")


@pytest.mark.parametrize(
    ("window", "error"),
    [(1, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")), (1, CUBLAS), (2, CUBLAS)],
)
def test_a_window_that_runs_out_of_memory_is_repeated_in_pieces_with_the_same_gradient(
    window: int, error: RuntimeError
) -> None:
    """A loss that fails on more than 5 samples stands for a small memory."""
    limit = 16

    def greedy(model: nn.Module, batch: Pair) -> Tensor:
        value = loss(model, batch)
        if len(batch[1]) > limit:
            raise error
        return value

    data = batches([16] * 6)
    ends = []
    for limit in (16, 5):  # noqa: B007, greedy reads it
        model, told = linear(), []
        step = Step(model, greedy, sgd(model), notify=told.append)
        values = [step(b, share=1 / window, last=n % window == window - 1).item() for n, b in enumerate(data)]
        ends.append((values, weights(model)))
    assert step.pieces == 4
    assert step.number == 6 // window
    assert ends[0][0] == pytest.approx(ends[1][0], rel=1e-5)
    assert torch.allclose(ends[0][1], ends[1][1], atol=1e-6)
    assert [line.split("; ")[1] for line in told] == [f"each batch is now trained on in {n} pieces" for n in (2, 4)]


def test_pieces_grow_back_and_later_each_time_that_is_too_early() -> None:
    pieces = Pieces(steps_before_growing=3)
    batch = torch.zeros(8, 1)
    pieces.halve(batch, "out of memory")
    pieces.halve(batch, "out of memory")
    assert [pieces.step_done() for _ in range(3)] == [False, False, True]
    assert pieces.count == 2
    pieces.halve(batch, "out of memory")
    assert [pieces.step_done() for _ in range(6)] == [False] * 5 + [True]
    assert pieces.count == 2


def test_a_single_sample_that_is_too_much_is_an_error() -> None:
    def greedy(model: nn.Module, batch: Pair) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")

    model = linear()
    step = Step(model, greedy, sgd(model), notify=lambda text: None)
    with pytest.raises(HotloopError, match="a single sample does not fit"):
        step(batches([4])[0])


@pytest.mark.parametrize("count", [1, 2, 3, 7, 16, 20])
def test_pieces_hold_every_sample_once(count: int) -> None:
    batch = {"images": torch.arange(16), "scale": torch.tensor(2.0), "names": ("a", torch.arange(16) * 2)}
    pieces = cut(batch, count)
    assert torch.equal(torch.cat([piece["images"] for piece, _ in pieces]), batch["images"])
    assert torch.equal(torch.cat([piece["names"][1] for piece, _ in pieces]), torch.arange(16) * 2)
    assert sum(share for _, share in pieces) == pytest.approx(1)
    assert max(share for _, share in pieces) <= -(-16 // count) / 16


def test_a_failed_call_leaves_nothing_for_the_next_window() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)

    def slope(model: nn.Module, batch: Tensor) -> Tensor:
        if batch.isnan().any():
            raise ValueError("a bad batch")
        return -model(batch).mean()

    step = Step(model, slope, torch.optim.SGD(model.parameters(), lr=1.0))
    step(torch.full((1, 1), 5.0), share=0.5, last=False)
    with pytest.raises(ValueError, match="a bad batch"):
        step(torch.full((1, 1), float("nan")), share=0.5)
    step(torch.ones(1, 1))
    assert model.weight.item() == 1.0
    assert step.number == 1


def test_clipping_counts_what_the_optimizer_changes() -> None:
    model = linear()
    frozen_scale = nn.Linear(4, 4)
    model.add_module("unused_by_optimizer", nn.Identity())
    outer = nn.ModuleList([model, frozen_scale])

    def both(outer: nn.Module, batch: Pair) -> Tensor:
        return loss(model, batch) + 1000 * frozen_scale(torch.ones(1, 4)).square().mean()

    step = Step(outer, both, torch.optim.SGD(model.parameters(), lr=1.0), settings=StepSettings(clip_norm=0.01))
    for batch in batches([8] * 3):
        before = weights(model)
        step(batch)
        assert (weights(model) - before).norm().item() == pytest.approx(0.01, rel=1e-3)


def named_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    labels = batch["labels"]
    return functional.cross_entropy(
        model(batch["images"]), torch.where(batch["valid"], labels, -100) if "valid" in batch else labels
    )


def named(sizes: list[int]) -> list[dict[str, Tensor]]:
    return [{"images": images, "labels": labels} for images, labels in batches(sizes)]


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("most", [100, 5])
def test_padding_changes_no_number(window: int, most: int) -> None:
    """Short batches lengthened to 8, also where memory for more than `most` samples is missing."""
    ends = []
    seen: list[int] = []
    for pad_to in (0, 8):
        model = linear()
        seen.clear()

        def short_of_memory(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            seen.append(len(batch["labels"]))
            if len(batch["labels"]) > most:
                raise torch.OutOfMemoryError("no room")
            return named_loss(model, batch)

        step = Step(model, short_of_memory, sgd(model), settings=StepSettings(pad_to=pad_to), notify=lambda text: None)
        parts = named([8, 3, 8, 1, 5, 8])
        values = []
        for start in range(0, len(parts), window):
            together = parts[start : start + window]
            samples = sum(len(part["labels"]) for part in together)
            for number, part in enumerate(together):
                values.append(step(part, len(part["labels"]) / samples, number == len(together) - 1).item())
        ends.append((values, weights(model)))
        if pad_to and most > 8:
            assert set(seen) == {8}
    assert ends[0][0] == pytest.approx(ends[1][0], rel=1e-5)
    assert torch.allclose(ends[0][1], ends[1][1], rtol=1e-5, atol=1e-6)


def test_what_cannot_be_padded_is_refused() -> None:
    model = linear()
    step = Step(model, named_loss, sgd(model), settings=StepSettings(pad_to=4))
    with pytest.raises(HotloopError, match="a batch of 5 samples cannot be padded to 4") as caught:
        step(named([5])[0])
    assert "pad_to=5" in caught.value.fix
    with pytest.raises(HotloopError, match="a tuple cannot be padded"):
        step(batches([3])[0])


def test_groups_that_come_later_are_refused() -> None:
    model, late = linear(), nn.Linear(2, 2)
    optimizer = sgd(model)
    step = Step(model, loss, optimizer)
    optimizer.add_param_group({"params": late.parameters()})
    with pytest.raises(HotloopError, match="has 2 parameter groups, and had 1"):
        step(batches([4])[0])


def test_averages_follow_a_buffer_that_is_replaced() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = linear()
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, images: Tensor) -> Tensor:
            self.seen = self.seen + 1
            logits: Tensor = self.linear(images)
            return logits

    model = Counts()
    step = Step(model, loss, sgd(model), settings=StepSettings(ema=0.5))
    for batch in batches([4] * 2):
        step(batch)
    assert isinstance(step.averaged, Counts)
    assert step.averaged.seen.item() == 1.5


def test_the_documented_loss_finds_its_mask_in_pieces_too() -> None:
    def documented(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if len(batch["labels"]) > 4:
            raise torch.OutOfMemoryError("no room")
        labels = batch["labels"].where(batch["valid"], -100)
        return functional.cross_entropy(model(batch["images"]), labels)

    model, seen = linear(), []
    step = Step(model, documented, sgd(model), settings=StepSettings(pad_to=8), notify=seen.append)
    for batch in named([8, 5, 3]):
        step(batch)
    assert step.pieces == 2
    assert len(seen) == 1


def test_only_tensors_as_long_as_the_batch_are_lengthened() -> None:
    padded = pad({"images": torch.ones(3, 2), "weights": torch.ones(2)}, 4)
    assert {name: len(tensor) for name, tensor in padded.items()} == {"images": 4, "weights": 2, "valid": 4}
    assert padded["valid"].tolist() == [True, True, True, False]


@pytest.mark.parametrize(
    "batch",
    [{"images": torch.ones(2, 3), "names": ["a", "b"]}, {"valid": torch.ones(2)}, {}, {"number": torch.tensor(1.0)}],
    ids=["other values", "a mask of its own", "empty", "no dimension"],
)
def test_batches_that_are_no_dicts_of_tensors_are_refused(batch: dict[str, Any]) -> None:
    with pytest.raises(HotloopError, match="cannot be padded"):
        pad(batch, 8)


def test_a_short_batch_is_cut_no_finer_than_it_must_be() -> None:
    """16 samples need four pieces; 5 need two of them, 3 one."""
    pieces = Pieces()
    whole = torch.zeros(16, 2)
    pieces.halve(whole, "no room")
    pieces.halve(whole, "no room")
    assert [pieces.of(torch.zeros(samples, 2)) for samples in (16, 5, 4, 3, 1)] == [4, 2, 1, 1, 1]


@pytest.mark.parametrize("window", [1, 2])
def test_what_fails_before_a_step_is_not_trained_on_later(window: int) -> None:
    """A schedule that raises once, then memory that runs out once: the window that is repeated is its own."""
    ends = []
    trouble: set[str] = set()

    def schedule(step: int) -> float:
        if step == 1 and "rate" in trouble:
            trouble.remove("rate")
            raise ValueError("no rate")
        return 1.0

    def once(model: nn.Module, batch: Pair) -> Tensor:
        if "memory" in trouble:
            trouble.remove("memory")
            raise torch.OutOfMemoryError("no room")
        return loss(model, batch)

    def train(step: Step, parts: list[Pair]) -> None:
        for part, batch in enumerate(parts):
            step(batch, 1 / window, part == window - 1)

    for broken in (False, True):
        model = linear()
        step = Step(model, once, sgd(model), schedule, notify=lambda text: None)
        parts = batches([8] * (3 * window))
        for number in range(3):
            if number == 1 and broken:
                trouble.add("rate")
                with pytest.raises(ValueError, match="no rate"):
                    train(step, batches([8] * window, seed=9))
                trouble.add("memory")
            train(step, parts[number * window : (number + 1) * window])
        ends.append((step.losses.take(wait=True), weights(model)))
    assert ends[0][0] == pytest.approx(ends[1][0], rel=1e-5)
    assert torch.allclose(ends[0][1], ends[1][1], atol=1e-6)


def test_an_update_that_fails_once_leaves_fp16_usable() -> None:
    model = linear()
    optimizer = sgd(model)
    original, calls = optimizer.step, []

    def flaky(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("once")
        return original(*arguments, **named)

    optimizer.step = flaky  # type: ignore[method-assign]
    step = Step(model, loss, optimizer, settings=StepSettings("fp16", clip_norm=1.0))
    parts = batches([8] * 4)
    step(parts[0])
    with pytest.raises(ValueError, match="once"):
        step(parts[1])
    step(parts[2])
    assert step.number == 2


def test_averages_follow_tensors_that_come_later() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = linear()

        def forward(self, images: Tensor) -> Tensor:
            if not hasattr(self, "table"):
                self.register_buffer("table", torch.full((3,), 2.0), persistent=False)
            logits: Tensor = self.linear(images)
            return logits

    model = Table()
    step = Step(model, loss, sgd(model), settings=StepSettings(ema=0.5))
    for batch in batches([4] * 3):
        step(batch)
    assert isinstance(step.averaged, Table)
    assert step.averaged.table.tolist() == [2.0] * 3


@given(
    shapes=st.lists(st.lists(st.integers(1, 5), max_size=4), min_size=1, max_size=6),
    turned=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_flat_gradients_are_the_gradients(shapes: list[list[int]], turned: bool, seed: int) -> None:
    """However they are laid out: `turned` has the last dimension first in memory."""
    draws = torch.Generator().manual_seed(seed)
    parameters = [nn.Parameter(torch.randn(shape, generator=draws).to(_DTYPES[len(shape) % 2])) for shape in shapes]
    if len(shapes[0]) == 4:
        parameters[0].data = parameters[0].data.contiguous(memory_format=torch.channels_last)
    flat = FlatGradients(nn.ParameterList(parameters), parameters)
    pieces = [[torch.randn(shape, generator=draws) for shape in shapes] for _ in range(2)]
    for window in range(2):  # the second finds what the first has left
        for number, piece in enumerate(pieces):
            given = [part.to(own.dtype) for part, own in zip(piece, parameters, strict=True)]
            given = [part.mT.contiguous().mT if turned and part.ndim > 1 else part for part in given]
            flat.put(list(given), number == 0)
        flat.attach()
        for parameter, one, other in zip(parameters, *pieces, strict=True):
            assert parameter.grad is not None
            assert parameter.grad.stride() == parameter.stride()
            assert torch.allclose(parameter.grad.float(), one + other, atol=0.05), window
    for tensor in flat.tensors:
        tensor.mul_(2)
    assert torch.allclose(parameters[0].grad.float(), 2 * (pieces[0][0] + pieces[1][0]), atol=0.1)  # type: ignore[union-attr]


_DTYPES = (torch.float32, torch.bfloat16)


def test_a_repeated_window_finds_batches_whose_memory_was_used_again() -> None:
    """A loader writes each batch into the same memory; memory runs out in the third of a window."""
    parts = batches([8, 8, 8])
    ends = []
    for limited in (False, True):
        model, seen = linear(), [0]

        def limited_loss(model: nn.Module, batch: Pair, seen: list[int] = seen, limited: bool = limited) -> Tensor:
            seen[0] += 1
            if limited and seen[0] == 3:
                raise torch.OutOfMemoryError("no room")
            return loss(model, batch)

        step = Step(model, limited_loss, sgd(model))
        room = tuple(torch.empty_like(tensor) for tensor in parts[0])
        for number, part in enumerate(parts):
            for own, tensor in zip(room, part, strict=True):
                own.copy_(tensor)
            step(room, share=1 / 3, last=number == 2)
        assert step.pieces == (2 if limited else 1)
        ends.append(weights(model))
    assert torch.allclose(*ends, atol=1e-6)


def test_an_interruption_before_a_window_leaves_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = linear(), linear()
    step, other = Step(model, loss, sgd(model)), Step(plain, loss, sgd(plain))
    first, second = batches([8, 8])

    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(step, "_begin_window", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step(first)
    for batch in (first, second):
        step(batch), other(batch)
    assert step.number == 2
    assert torch.equal(weights(model), weights(plain))


@pytest.mark.parametrize(("devices", "words"), [([0, 1], 1), ([0], 0)])
def test_a_model_in_data_parallel_over_several_gpus_is_advised_against(devices: list[int], words: int) -> None:
    model = nn.DataParallel(linear())
    model.device_ids = devices  # as they are where there are GPUs
    told: list[str] = []
    Step(model, loss, sgd(model), notify=told.append)
    assert sum("DistributedDataParallel" in line for line in told) == words
