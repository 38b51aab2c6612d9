"""The whole step in a CUDA graph: the same numbers as the step as it stands, and a reason where it cannot be."""

import copy
import gc
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import hotloop
from hotloop import HotloopError, Step, StepSettings
from hotloop.tasks.cross_entropy import into_gradient, linear_cross_entropy
from hotloop.train.losses import check_finite

Pair = tuple[Tensor, Tensor]


@pytest.fixture(autouse=True)
def _exact() -> Iterator[None]:
    """Sums in one order, so that equal work gives equal bits."""
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.backends.fp32_precision = "ieee"
    yield
    torch.backends.cudnn.deterministic = False


def loss(model: nn.Module, batch: Pair) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def cnn(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(288, 4),
    ]
    return nn.Sequential(*layers).cuda()


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, 4)).cuda()


def batches(sizes: list[int]) -> list[Pair]:
    draws = torch.Generator("cuda").manual_seed(1)
    return [
        (
            torch.randn(size, 3, 8, 8, generator=draws, device="cuda"),
            torch.randint(0, 4, (size,), generator=draws, device="cuda"),
        )
        for size in sizes
    ]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([tensor.detach().float().flatten() for tensor in model.state_dict().values()])


def train(step: Step, data: list[Pair], window: int = 1) -> list[float]:
    losses = []
    for number, batch in enumerate(data):
        in_window = min(window, len(data) - number // window * window)
        last = number % window == in_window - 1
        losses.append(step(batch, share=1 / in_window, last=last))
    return [value.item() for value in losses]


@pytest.mark.parametrize("make_optimizer", [sgd, adam])
@pytest.mark.parametrize(
    "settings",
    [
        StepSettings("fp32"),
        StepSettings("fp32", clip_norm=0.5, ema=0.9),
        StepSettings("bf16"),
        StepSettings("fp16", clip_norm=0.5),
    ],
    ids=["plain", "clip and average", "bf16", "fp16"],
)
@pytest.mark.parametrize("window", [1, 3])
def test_a_captured_step_is_the_step(
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer], settings: StepSettings, window: int
) -> None:
    data = batches([16] * 26)
    ends = []
    for graph in (False, True):
        model = cnn()
        told: list[str] = []
        chosen = replace(settings, graph=graph)
        optimizer = make_optimizer(model)
        if not graph:  # the same kernels: what capturing switches on is a rounding apart
            optimizer = type(optimizer)(model.parameters(), **{**_options(optimizer), "fused": True})
        step = Step(model, loss, optimizer, lambda number: 0.97**number, chosen, told.append)
        values = train(step, data, window)
        assert step.captured == graph
        assert told == []
        ends.append((values, weights(model), step.averaged and weights(step.averaged), step.number, step.scale))
    near = 1e-5 if settings.precision == "fp32" else 2e-3  # sums may run in another order
    assert ends[0][0] == pytest.approx(ends[1][0], rel=near)
    assert torch.allclose(ends[0][1], ends[1][1], rtol=near, atol=near)
    if settings.ema:
        assert torch.allclose(ends[0][2], ends[1][2], rtol=near, atol=near)
    assert ends[0][3:] == ends[1][3:]


def _options(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {key: value for key, value in optimizer.defaults.items() if key in ("lr", "momentum", "weight_decay")}


def test_dropout_draws_anew_at_each_replay() -> None:
    model = cnn(dropout=0.5)
    step = Step(model, loss, torch.optim.SGD(model.parameters(), lr=0.0))
    values = train(step, batches([16])[:1] * 12)
    assert step.captured
    assert len(set(values[4:])) > 4


def test_the_returned_losses_stay_what_they_are() -> None:
    step = Step(model := linear(), loss, sgd(model))
    kept = [step(batch) for batch in batches([8]) * 10]
    assert len({value.item() for value in kept}) == 10


def test_a_rare_shape_is_captured_too_and_counts_the_same() -> None:
    data = batches(([16] * 7 + [5]) * 6)
    ends = []
    for graph in (False, True):
        model, told = cnn(), []
        step = Step(model, loss, sgd(model), settings=StepSettings(graph=graph), notify=told.append)
        train(step, data)
        ends.append(weights(model))
    assert torch.allclose(ends[0], ends[1], rtol=1e-5, atol=1e-6)
    assert told == []


@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
def test_padded_batches_are_one_graph_and_one_compilation() -> None:
    def named(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        labels = torch.where(batch["valid"], batch["labels"], -100) if "valid" in batch else batch["labels"]
        return functional.cross_entropy(model(batch["images"]), labels)

    data = [{"images": images, "labels": labels} for images, labels in batches(([16] * 4 + [5]) * 6)]
    ends, told = [], []
    for settings in (StepSettings(graph=False), StepSettings(pad_to=16, compile="model")):
        model = linear()
        step = Step(model, named, sgd(model), settings=settings, notify=told.append)
        for batch in data:
            step.run(batch)
        ends.append(weights(model))
    assert step.captured, step.not_captured
    assert told == []
    assert step.executor.replays == len(data) - 3
    assert torch.allclose(ends[0], ends[1], rtol=1e-4, atol=1e-5)


def waits(model: nn.Module, batch: Pair) -> Tensor:
    value = loss(model, batch)
    return value if value.item() > -1 else value * 2


def draws(model: nn.Module, batch: Pair) -> Tensor:
    return loss(model, batch) * (1 + random.random() * 0)


def picks(model: nn.Module, batch: Pair) -> Tensor:
    chosen = batch[1] < 2
    return functional.cross_entropy(model(batch[0])[chosen], batch[1][chosen])


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (waits, "`return value if value.item() > -1 else value * 2` ("),
        (draws, "random numbers are drawn from random on the host"),
        (picks, "`return functional.cross_entropy(model(batch[0])[chosen], batch[1][chosen])` ("),
    ],
)
def test_what_cannot_be_captured_is_named_once_and_trains_the_same(kind: Any, reason: str) -> None:
    data = batches([16] * 10)
    plain, model = linear(), linear()
    told: list[str] = []
    step = Step(model, kind, sgd(model), notify=told.append)
    values = train(step, data)
    expected = train(Step(plain, kind, sgd(plain), settings=StepSettings(graph=False)), data)
    assert values == pytest.approx(expected, rel=1e-5)
    assert not step.captured
    assert len(told) == 1
    assert reason in told[0]
    assert step.not_captured


def numbered(model: nn.Module, batch: tuple[Pair, int]) -> Tensor:
    return loss(model, batch[0]) + 0.0 * batch[1]


@pytest.mark.parametrize("compiled", ["", "model"])
def test_a_number_that_changes_each_step_is_named_once_and_few_numbers_are_captured(compiled: str) -> None:
    data, told = batches([16] * 40), []
    model = linear()
    step = Step(model, numbered, sgd(model), settings=StepSettings("bf16", compile=compiled), notify=told.append)
    for number, batch in enumerate(data):
        step((batch, number % 2))
    assert step.captured, step.not_captured
    for number, batch in enumerate(data):
        step((batch, number))
    assert not step.captured
    few = ["batches that differ from the usual ones in a number are not compiled"] if compiled else []
    expected = [*few, "numbers in the batch change from step to step"]
    assert len(told) == len(expected)
    assert all(words in line for words, line in zip(expected, told, strict=True))


@pytest.mark.parametrize("compiled", ["", "model"])
def test_a_number_that_changes_is_told_without_capture_only_if_something_is_compiled(compiled: str) -> None:
    data, told = batches([16] * 40), []
    model = linear()
    settings = StepSettings("bf16", compile=compiled, graph=False)
    step = Step(model, numbered, sgd(model), settings=settings, notify=told.append)
    for number, batch in enumerate(data):
        step((batch, number))
    assert not any("captured" in line for line in told), told
    assert any("the step is not compiled: numbers" in line for line in told) == bool(compiled)


class Once:
    """Waits for the GPU at its fourth call alone, which is the capture."""

    calls = 0

    def __call__(self, model: nn.Module, batch: Pair) -> Tensor:
        value = loss(model, batch)
        self.calls += 1
        if self.calls == 4:
            torch.cuda.synchronize()
        return value


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_capture_that_breaks_off_leaves_nothing_behind(precision: str) -> None:
    model, told, stream = cnn(dropout=0.5), [], torch.cuda.current_stream()
    step = Step(model, Once(), sgd(model), settings=StepSettings(precision), notify=told.append)
    values = train(step, batches([16] * 10))
    assert step.not_captured
    assert len(told) == 1
    assert "previous error during capture" in told[0]
    assert all(map(math.isfinite, values))
    assert torch.cuda.current_stream() == stream
    other = Step(model, loss, sgd(model), settings=StepSettings(precision))
    train(other, batches([16] * 6))
    assert other.captured, other.not_captured


def test_old_graphs_are_not_collected_in_the_middle_of_a_capture() -> None:
    """A graph in a cycle of references, freed while another is captured, would break that off."""

    old = Step(model := linear(), loss, sgd(model))
    train(old, batches([16] * 6))
    kept, calls = [old], 0
    del old

    def makes_garbage(model: nn.Module, batch: Pair) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 4:  # the capture
            cycle: list[Any] = [kept.pop()]
            cycle.append(cycle)
            del cycle
        filler = [[number] for number in range(200_000)]
        return loss(model, batch) + len(filler) * 0

    step = Step(model := linear(), makes_garbage, sgd(model))
    train(step, batches([16] * 6))
    assert step.captured, step.not_captured


def test_batches_on_the_cpu_are_a_reason() -> None:
    def from_cpu(model: nn.Module, batch: Pair) -> Tensor:
        return loss(model, (batch[0].cuda(), batch[1].cuda()))

    told: list[str] = []
    model = linear()
    step = Step(model, from_cpu, sgd(model), notify=told.append)
    train(step, [(images.cpu(), labels.cpu()) for images, labels in batches([8] * 6)])
    assert len(told) == 1
    assert "`return loss(model, (batch[0].cuda(), batch[1].cuda()))`" in told[0] or "the batch is on the CPU" in told[0]


class Signs(torch.optim.Optimizer):
    """An optimizer of a user's own that knows nothing of graphs."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad.sign(), alpha=-float(group["lr"]))


@pytest.mark.parametrize("window", [1, 2])
def test_an_optimizer_that_cannot_be_captured_runs_after_captured_gradients(window: int) -> None:
    data = batches([16] * 12)
    ends = []
    for graph in (False, True):
        model, told = linear(), []
        step = Step(
            model, loss, Signs(model.parameters(), lr=0.001), lambda number: 1 / (number + 1),
            StepSettings(graph=graph), told.append,
        )  # fmt: skip
        values = train(step, data, window)
        ends.append((values, weights(model)))
        assert step.captured == graph
    assert ends[0][0] == pytest.approx(ends[1][0], rel=1e-5)
    assert torch.allclose(ends[0][1], ends[1][1], atol=1e-6)
    assert told == [
        "the optimizer's step is not captured into the CUDA graph: Signs has neither a fused nor a capturable form"
    ]


def test_a_scheduler_of_the_users_own_reaches_a_captured_step() -> None:
    data = batches([16] * 12)
    ends = []
    for graph in (False, True):
        model = linear()
        optimizer = sgd(model)
        step = Step(model, loss, optimizer, settings=StepSettings(graph=graph))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        for batch in data:
            step(batch)
            scheduler.step()
        ends.append(weights(model))
        assert step.captured == graph
        assert step.learning_rate == pytest.approx(0.1 * 0.8**12, rel=1e-4)
    assert torch.allclose(ends[0], ends[1], atol=1e-6)


def test_another_weight_decay_is_captured_anew() -> None:
    data = batches([16] * 20)
    ends = []
    for graph in (False, True):
        model = linear()
        optimizer = sgd(model)
        step = Step(model, loss, optimizer, settings=StepSettings(graph=graph))
        for number, batch in enumerate(data):
            if number == 10:
                optimizer.param_groups[0]["weight_decay"] = 0.1
            step(batch)
        ends.append(weights(model))
        assert step.captured == graph
    assert torch.allclose(ends[0], ends[1], atol=1e-6)


@pytest.mark.parametrize("window", [1, 2])
def test_layers_that_are_frozen_later_stay_as_they_are(window: int) -> None:
    ends = []
    for graph in (False, True):
        model = cnn()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        step = Step(model, loss, optimizer, settings=StepSettings(graph=graph))
        data = batches([16] * 12 * window)
        for part, settings in enumerate(((True, True), (False, True), (False, False))):
            model[0].requires_grad_(settings[0])
            model[1].train(settings[1])
            for number, batch in enumerate(data[part * 6 * window : (part + 1) * 6 * window]):
                step.run(batch, 1 / window, number % window == window - 1)
            if part == 0:
                before = model[0].weight.detach().clone()
        assert torch.equal(model[0].weight, before)
        assert step.captured == graph
        ends.append(torch.cat([weights(model), model[1].running_mean]))
    assert torch.allclose(ends[0], ends[1], rtol=1e-4, atol=1e-5)


def test_a_buffer_that_is_replaced_is_a_reason() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = linear()
            self.register_buffer("seen", torch.zeros(1, device="cuda"))

        def forward(self, images: Tensor) -> Tensor:
            self.seen = self.seen + 1
            logits: Tensor = self.linear(images)
            return logits

    model, told = Counts(), []
    step = Step(model, loss, sgd(model), notify=told.append)
    train(step, batches([16] * 8))
    assert "a new tensor where its buffer seen was" in step.not_captured
    assert model.seen.item() == 8


def test_a_loaded_state_is_captured_anew() -> None:
    data = batches([16] * 12)
    through, first, second = cnn(), cnn(), cnn()
    steps = [Step(model, loss, adam(model), settings=StepSettings(ema=0.5)) for model in (through, first, second)]
    train(steps[0], data)
    train(steps[1], data[:6])
    train(steps[2], data[:5])
    steps[2].load_state_dict(copy.deepcopy(steps[1].state_dict()))
    train(steps[2], data[6:])
    assert torch.allclose(weights(second), weights(through), rtol=1e-4, atol=1e-5)
    assert steps[2].number == 12


@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
def test_compiled_and_captured_agree_with_neither() -> None:
    data = batches([16] * 8 + [6] + [16] * 3)
    ends = []
    for compiled in ("", "model"):
        model, told = cnn(), []
        settings = StepSettings(compile=compiled, graph=bool(compiled))
        step = Step(model, loss, sgd(model), settings=settings, notify=told.append)
        values = train(step, data)
        ends.append((values, weights(model)))
    assert step.captured
    assert told == ["batches of the rarer shape (6, 3, 8, 8), (6,) are not compiled"]
    assert ends[1][0] == pytest.approx(ends[0][0], rel=1e-3)
    assert torch.allclose(ends[0][1], ends[1][1], atol=1e-3)


@pytest.mark.filterwarnings("error:.*:UserWarning", "ignore::DeprecationWarning")
def test_a_model_that_does_not_compile_is_captured_as_it_stands() -> None:
    """A compiler whose warnings are errors stands for one that fails."""
    model, told = linear(), []
    step = Step(model, loss, adam(model), settings=StepSettings(compile="model", ema=0.5), notify=told.append)
    values = train(step, batches([16]) * 8)
    assert values[-1] < values[0]
    assert step.captured


@pytest.mark.parametrize("window", [1, 2])
def test_out_of_memory_is_recovered_with_the_same_gradient(window: int) -> None:
    """Layers whose activations pass a cap on the process's memory; in pieces they do not."""
    width, size = 4096, 16384

    def wide() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(64, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 8)
        ).cuda()

    draws = torch.Generator("cuda").manual_seed(0)
    data = [
        (
            torch.randn(size, 64, device="cuda", generator=draws),
            torch.randint(0, 8, (size,), device="cuda", generator=draws),
        )
        for _ in range(8)
    ]
    ends = []
    total = torch.cuda.mem_get_info()[1]
    for room in (0, int(0.9 * 2**30)):
        model, told = wide(), []
        step = Step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), notify=told.append)
        gc.collect()
        torch.cuda.empty_cache()
        if room:
            torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + room) / total)
        try:
            values = train(step, data, window)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        ends.append((values, weights(model)))
    assert step.pieces > 1
    assert step.captured
    assert any("out of memory; each batch is now trained on in" in line for line in told)
    assert ends[0][0] == pytest.approx(ends[1][0], rel=1e-4)
    assert torch.allclose(ends[0][1], ends[1][1], atol=1e-5)


def test_a_sample_that_does_not_fit_is_an_error() -> None:
    model = linear()

    def greedy(model: nn.Module, batch: Pair) -> Tensor:
        return loss(model, batch) + torch.zeros(2**42, device="cuda").sum()

    step = Step(model, greedy, sgd(model), notify=lambda text: None)
    with pytest.raises(HotloopError, match="a single sample does not fit into the GPU's memory"):
        step(batches([8])[0])


@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
@pytest.mark.parametrize("make_optimizer", [sgd, adam])
def test_a_compiled_update_is_the_fused_one(make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    data = batches([16] * 12)
    ends = []
    for compiled in ("", "model"):
        model = linear()
        settings = StepSettings(compile=compiled, clip_norm=1.0, ema=0.5)
        step = Step(model, loss, make_optimizer(model), lambda number: 0.9**number, settings)
        values = train(step, data)
        assert step.captured
        ends.append((values, weights(model)))
    assert ends[0][0] == pytest.approx(ends[1][0], rel=1e-3)
    assert torch.allclose(ends[0][1], ends[1][1], atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 5), (64, 50304), (3, 4097), (1, 2)])
def test_the_cross_entropy_kernel_is_the_plain_one(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    logits = (4 * torch.randn(shape, device="cuda")).to(dtype)
    logits[0, 0] = 200.0
    targets = torch.randint(0, shape[1], shape[:1], device="cuda")
    targets[1::7] = -100  # they do not count
    exact = logits.double().requires_grad_()
    expected = functional.cross_entropy(exact, targets, reduction="none")
    expected.sum().backward()
    losses = into_gradient(logits, targets)
    assert torch.allclose(losses.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.allclose(logits.double(), exact.grad, atol=1e-6 if dtype == torch.float32 else 4e-3)


def test_a_leak_is_noticed_and_its_line_named() -> None:
    told: list[str] = []
    detector = hotloop.LeakDetector(told.append)
    held, model = [], linear()
    for number, (images, labels) in enumerate(batches([8] * 20)):
        value = loss(model, (images, labels))
        held.append(torch.zeros(1 << 20, device="cuda") + value.detach())  # the leak
        detector.look(number)
    assert len(told) == 1
    assert "memory grows by 4" in told[0]
    assert "# the leak" in told[0]


def test_steady_memory_is_no_leak() -> None:
    told: list[str] = []
    detector = hotloop.LeakDetector(told.append)
    model = linear()
    step = Step(model, loss, adam(model))
    for number, batch in enumerate(batches([8] * 60)):
        step(batch)
        detector.look(number)
    assert told == []


def test_marks_tell_what_was_allocated() -> None:
    marks = hotloop.MemoryMarks()
    marks.mark("before")
    held = torch.zeros(1 << 24, device="cuda")
    marks.mark("after")
    (_, before), (_, after) = marks.reports
    assert after.allocated_bytes - before.allocated_bytes == held.nbytes
    assert after.total_bytes > 2**30
    assert "free" in str(marks)


def test_weights_that_are_not_finite_are_found() -> None:
    for value in (float("nan"), float("inf")):
        with pytest.raises(HotloopError, match="not finite"):
            check_finite([torch.ones(5, device="cuda"), torch.tensor([1.0, value], device="cuda")], 3)
    check_finite([torch.full((10,), 6e4, dtype=torch.float16, device="cuda")], 3)


@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("tokens", "held_in"), [(100, torch.float32), (6000, torch.float32), (100, torch.bfloat16)])
def test_linear_cross_entropy_on_the_card_is_the_plain_one(
    tokens: int, held_in: torch.dtype, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights in 16 bits have it in one piece."""
    monkeypatch.setattr("hotloop.tasks.cross_entropy.CHUNK_BYTES", 2000 * 1024 * 2)
    torch.manual_seed(0)
    hidden, weight = torch.randn(tokens, 64, device="cuda"), (torch.randn(1024, 64, device="cuda") / 8).to(held_in)
    targets = torch.randint(0, 1024, (tokens,), device="cuda")
    targets[1::7] = -100
    exact = [tensor.double().requires_grad_() for tensor in (hidden, weight)]
    expected = functional.cross_entropy(exact[0] @ exact[1].T, targets)
    expected.backward()
    own = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        function = torch.compile(linear_cross_entropy, fullgraph=True) if compiled else linear_cross_entropy
        value = function(own[0], own[1], targets)
    value.backward()
    assert value.item() == pytest.approx(expected.item(), rel=1e-3)
    for mine, theirs in zip(own, exact, strict=True):
        assert ((mine.grad - theirs.grad).norm() / theirs.grad.norm()).item() < 1e-2


def test_linear_cross_entropy_holds_the_gradient_of_the_weight_once(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary, width, tokens, pieces = 32_768, 1024, 4096, 4
    chunk = vocabulary * tokens // pieces * 2
    monkeypatch.setattr("hotloop.tasks.cross_entropy.CHUNK_BYTES", chunk)
    hidden = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(vocabulary, width, device="cuda", dtype=torch.bfloat16)
    targets = torch.randint(0, vocabulary, (tokens,), device="cuda")
    torch.ops.hotloop.linear_cross_entropy(hidden, weight, targets, False)  # cuBLAS takes its workspace, which stays
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.ops.hotloop.linear_cross_entropy(hidden, weight, targets, False)
    gradient = vocabulary * width * 4
    assert torch.cuda.max_memory_allocated() - before < 1.1 * (gradient + chunk + hidden.nbytes)
