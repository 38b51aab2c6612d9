"""A traced step against steps that are computed: what is kept, what the optimizer remembers, how it grows."""

import resource
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import hotloop
from hotloop.core.errors import InputError
from hotloop.core.job import Job
from hotloop.plan import trace
from hotloop.plan.allocations import scratch_of
from hotloop.plan.footprint import scaled
from hotloop.plan.one_step import SAMPLES, OneStep
from hotloop.plan.trace import Tracer, Way


class Rows(hotloop.Dataset):
    """Of one shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def __len__(self) -> int:
        return 64

    def sample(self, index: int, random: np.random.Generator) -> dict[str, np.ndarray]:
        return {"inputs": np.zeros(self.shape, np.float32)}

    def fingerprint(self) -> str:
        return str(self.shape)


class Mean(hotloop.Task):
    """The mean square of what a model gives."""

    def __init__(self, job: Job, made: Callable[[], nn.Module]) -> None:
        super().__init__(job)
        self.made = made

    def data(self, split: str) -> hotloop.Dataset:
        return Rows(())

    def model(self) -> nn.Module:
        return self.made()

    def loss(self, outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return outputs.square().mean()


class Block(nn.Module):
    """Attention and a perceptron."""

    def __init__(self, width: int = 64, causal: bool = True) -> None:
        super().__init__()
        self.causal = causal
        self.norm = nn.LayerNorm(width)
        self.into = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x_BTC: Tensor) -> Tensor:
        parts = self.into(self.norm(x_BTC)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        x_BTC = x_BTC + self.out(mixed.transpose(1, 2).flatten(2))
        wider: Tensor = self.down(functional.gelu(self.up(x_BTC)))
        return x_BTC + wider


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 16))


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3))


def transformer(blocks: int = 3) -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(blocks)))


MODELS: list[tuple[Callable[[], nn.Module], tuple[int, ...]]] = [
    (perceptron, (256,)),
    (convolutional, (3, 32, 32)),
    (transformer, (16, 64)),
]


def tracer(
    made: Callable[[], nn.Module], shape: tuple[int, ...], kind: type[Tracer] = Tracer, **changes: Any
) -> Tracer:
    job = Job.model_validate(
        {"task": {"name": "x:Y"}, "data": {"train": "x", "batch_size": 8}, "model": {"name": "m"},
         "optimizer": {"name": "adamw", "learning_rate": 0.1}, "device": "cpu", **changes}
    )  # fmt: skip
    return kind(job, Mean(job, made), Rows(shape))


def kept(model: nn.Module, batch: Tensor) -> int:
    """Bytes that forward really keeps for backward, beside weights, buffers and the batch."""
    known = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers(), batch)}
    storages: dict[int, int] = {}
    alive: list[Tensor] = []  # or an address would be used again

    def pack(tensor: Tensor) -> Tensor:
        alive.append(tensor)
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(batch).square().mean()
    return sum(storages.values())


@pytest.mark.parametrize(("made", "shape"), MODELS)
def test_what_is_kept_is_what_a_real_forward_keeps(made: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    expected = kept(made(), torch.zeros(1024, *shape))
    passes = tracer(made, shape).trace(Way(1024, "fp32")).passes
    found = max(moment.activations + moment.temporary for moment in passes)
    assert expected <= found <= 2 * expected, "and beside it a few results on their way"


def test_weights_and_the_optimizers_memory_are_counted() -> None:
    state, model = tracer(perceptron, (256,)).state, perceptron()
    size = 4 * sum(parameter.numel() for parameter in model.parameters())
    assert state.parameter_bytes == state.learnt_bytes == size
    assert state.optimizer_bytes == pytest.approx(2 * size, rel=0.01), "two moments of each weight"


def test_recomputing_keeps_less_in_the_order_of_what_it_costs() -> None:
    of = tracer(transformer, (64, 64))
    for compiled in (False, True):
        ways = [Way(8, "fp32", how, compiled) for how in ("keep", "selective", "blocks")]
        memory = [max(moment.activations for moment in of.trace(way).passes) for way in ways]
        assert memory[0] > memory[1] > memory[2], (compiled, memory)


@pytest.mark.slow
def test_a_batch_twice_as_large_keeps_twice_as_much() -> None:
    of = tracer(transformer, (64, 64))
    for compiled in (False, True):
        one, two = (of.trace(Way(batch, "bf16", compiled=compiled)) for batch in (8, 16))
        grown = two.passes[0].activations / one.passes[0].activations
        assert grown == pytest.approx(2, rel=0.1)
        assert two.flops == pytest.approx(2 * one.flops, rel=0.01)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("made", "shape"), MODELS)
def test_another_batch_computes_and_moves_what_is_reckoned_for_it(
    made: Callable[[], nn.Module], shape: tuple[int, ...], compiled: bool
) -> None:
    # Both so large that the compiler sums long rows in both: with fewer it makes other kernels.
    few, many = (tracer(made, shape).trace(Way(batch, "fp32", compiled=compiled)) for batch in (28, 112))
    for one, batch, other in ((few, 112, many), (many, 28, few)):
        reckoned = scaled(one, batch)
        moved, expected = (sum(cost.count * cost.bytes for cost in each.pass_costs) for each in (reckoned, other))
        assert reckoned.flops == other.flops
        assert moved == pytest.approx(expected, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("activations", ["keep", "selective", "blocks"])
def test_blocks_that_are_not_traced_are_like_those_that_are(
    activations: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    way = Way(8, "bf16", activations, compiled)
    few = tracer(lambda: transformer(7), (64, 64)).trace(way)
    monkeypatch.setattr(trace, "are_alike", lambda blocks: False)
    whole = tracer(lambda: transformer(7), (64, 64)).trace(way)
    peaks = [max(moment.bytes for moment in footprint.passes) for footprint in (few, whole)]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.01)
    assert few.flops == pytest.approx(whole.flops, rel=0.01)


def test_a_compiled_block_that_is_recomputed_holds_its_perceptrons_inner_results_in_attentions_backward() -> None:
    """What weights' gradients are made of is held so long, beside a query's gradient in fp32."""
    samples, length, width = 512, 64, 64
    found = tracer(transformer, (length, width)).trace(Way(samples, "bf16", "blocks", True)).passes
    perceptron, attention = 2 * 4 * width, (3 + 2 + 3) * width  # in 16 bits: results and their gradients
    rest = 4 * width + (3 + 1) * 4 * width  # in 32: the query's gradient, and the blocks' own results and gradient
    assert max(moment.bytes for moment in found) > samples * length * (2 * (perceptron + attention) + rest)


@pytest.mark.parametrize(
    ("heads", "dtype", "expected"), [(4, torch.bfloat16, 4), (2, torch.float16, 8), (2, torch.float32, 0)]
)
def test_what_attentions_backward_takes_beside(heads: int, dtype: torch.dtype, expected: int) -> None:
    query, key = torch.empty(3, 4, 5, 8, dtype=dtype), torch.empty(3, heads, 5, 8, dtype=dtype)
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    assert scratch_of(operator, (query, query, key, key)) == expected * query.numel()
    assert scratch_of(torch.ops.aten.mm.default, (query, query)) == 0


def test_billions_of_weights_take_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    of = tracer(lambda: nn.Sequential(nn.Linear(40_000, 40_000), nn.Linear(40_000, 40_000)), (40_000,))
    assert of.state.parameters > 3_000_000_000
    assert of.trace(Way(4, "bf16")).flops > 0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000, "KiB"


@pytest.mark.parametrize("compiled", [True, False])
def test_attention_that_sees_all_computes_twice_as_much(compiled: bool) -> None:
    def flops(causal: bool) -> float:
        way = Way(8, "fp32", compiled=compiled)
        costs = tracer(lambda: nn.Sequential(Block(causal=causal)), (16, 64)).trace(way).pass_costs
        return sum(cost.count * cost.flops for cost in costs if cost.kind == "attention")

    assert flops(causal=False) == 2 * flops(causal=True) > 0


def test_asking_a_tensor_where_it_is_costs_nothing() -> None:
    class Asks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            assert all(x.device == self.weight.device for _ in range(20))
            return super().forward(x)

    asks, plain = (
        tracer(made, (256,)).trace(Way(8, "fp32")).pass_costs
        for made in (lambda: nn.Sequential(Asks(256, 4)), lambda: nn.Sequential(nn.Linear(256, 4)))
    )
    assert asks == plain
    assert sum(cost.count for cost in plain) < 20


def test_rms_norm_is_one_kernel_as_on_a_gpu() -> None:
    def moved(norm: Callable[[], nn.Module]) -> float:
        costs = tracer(lambda: nn.Sequential(nn.Linear(256, 256), norm()), (256,)).trace(Way(512, "fp32")).pass_costs
        return sum(cost.count * cost.bytes for cost in costs)

    assert moved(lambda: nn.RMSNorm(256)) == pytest.approx(moved(lambda: nn.LayerNorm(256, bias=False)), rel=0.01)


@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("made", "shape"), MODELS)
def test_a_step_that_is_made_is_as_one_that_is_traced(
    made: Callable[[], nn.Module], shape: tuple[int, ...], precision: str, divided: bool
) -> None:
    traced, found = (
        tracer(made, shape, kind).trace(Way(SAMPLES, precision, divided=divided)) for kind in (Tracer, OneStep)
    )
    assert (found.passes, found.flops) == (traced.passes, traced.flops)
    moved = [sum(cost.bytes * cost.count for cost in one.pass_costs) for one in (found, traced)]
    assert moved[0] == pytest.approx(moved[1], rel=0.001)  # fakes of a CPU keep another number a channel


def test_a_step_that_is_made_has_few_samples_and_is_not_compiled() -> None:
    found = tracer(perceptron, (256,), OneStep).trace(Way(4096, "bf16", compiled=True))
    assert found == tracer(perceptron, (256,)).trace(Way(SAMPLES, "bf16"))


def test_weights_that_do_not_fit_here_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotloop.plan.one_step.usable_memory_bytes", lambda: 1_000_000)
    with pytest.raises(InputError, match="weights and gradients take"):
        tracer(perceptron, (256,), OneStep).trace(Way(8, "fp32"))


class Grouped(nn.Module):
    """Attention of eight heads over two of keys and values, or over as many as are repeated for it."""

    def __init__(self, repeated: bool) -> None:
        super().__init__()
        self.repeated = repeated
        self.query, self.key = nn.Linear(64, 64), nn.Linear(64, 16)

    def forward(self, x_BTC: Tensor) -> Tensor:
        query, key = (part.unflatten(-1, (-1, 8)).transpose(1, 2) for part in (self.query(x_BTC), self.key(x_BTC)))
        if self.repeated:
            key = key.repeat_interleave(4, dim=1)
        return functional.scaled_dot_product_attention(query, key, key, enable_gqa=not self.repeated)


@pytest.mark.parametrize("compiled", [False, True])
def test_fewer_heads_of_keys_compute_as_much_as_repeated_ones(compiled: bool) -> None:
    few, repeated = (
        tracer(lambda many=many: Grouped(many), (16, 64)).trace(Way(8, "fp32", compiled=compiled))  # type: ignore[misc]
        for many in (False, True)
    )
    attention = [[cost for cost in one.pass_costs if cost.kind == "attention"] for one in (few, repeated)]
    forward, backward = 2 * 8 * 8 * 16 * 16 * 2 * 8, 2 * 8 * 8 * 16 * 16 * 5 * 8
    for costs in attention:
        assert sum(cost.flops * cost.count for cost in costs) == forward + backward
