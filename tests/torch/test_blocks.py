"""Repeated blocks, recomputation, layers in fp32, and what a model's arithmetic is."""

import copy
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_training import small
from tiny import Regression
from torch import Tensor, nn

from hotloop import InputError, Step, StepSettings
from hotloop.core.machine import read_machine
from hotloop.tasks.transformers import Decoder, Shape, build_decoder
from hotloop.train.average import Averaged
from hotloop.train.blocks import recompute_activations, repeated_blocks
from hotloop.train.flops import Arithmetic, flops_per_sample, matrix_rate
from hotloop.train.precision import choose_precision, keep_in_fp32, use_float8
from hotloop.train.prepare import prepare
from hotloop.train.resolve import choose_compile, resolve

TINY = {"layers": 3, "width": 16, "heads": 2, "kv_heads": 2, "hidden": 32}


def decoder() -> Decoder:
    torch.manual_seed(0)
    return build_decoder("gpt2", 50, 8, TINY)


def tokens() -> Tensor:
    return torch.randint(0, 50, (4, 8), generator=torch.Generator().manual_seed(0))


def gradients(model: nn.Module) -> Tensor:
    model(tokens(), tokens()).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


@pytest.mark.parametrize(
    ("name", "kind", "count"),
    [
        ("resnet50", "Bottleneck", 16),
        ("vit_b_16", "EncoderBlock", 12),
        ("convnext_tiny", "CNBlock", 0),
        ("alexnet", "", 0),
    ],
)
def test_the_blocks_of_known_networks_are_found(name: str, kind: str, count: int) -> None:
    from torchvision import models

    with torch.device("meta"):
        blocks = repeated_blocks(models.get_model(name))
    assert {type(block).__name__ for block in blocks} == ({kind} if count else set())
    assert len(blocks) == count


def test_the_blocks_of_a_decoder_are_found() -> None:
    assert [type(block).__name__ for block in repeated_blocks(decoder())] == ["Block"] * 3


@pytest.mark.parametrize("how", ["blocks", "selective"])
def test_recomputed_activations_give_the_same_gradients(how: str) -> None:
    plain, lean = decoder(), decoder()
    names = list(lean.state_dict())
    assert recompute_activations(lean, how) == 3
    assert list(lean.state_dict()) == names
    assert torch.allclose(gradients(plain), gradients(lean), atol=1e-6)
    clone = copy.deepcopy(lean)
    with torch.no_grad():
        clone.blocks[0].attention.out.weight.zero_()  # type: ignore[union-attr, operator]
        assert not torch.allclose(clone(tokens()), lean(tokens())), "a copy has weights of its own"


class Inplace(nn.Module):
    """A layer whose result its activation overwrites."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.relu = nn.Linear(8, 8), nn.Linear(8, 8), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.relu(self.first(x)))
        return result


def test_activations_in_place_do_not_overwrite_what_is_kept() -> None:
    found = []
    for how in ("", "selective"):
        torch.manual_seed(0)
        model = nn.Sequential(*[Inplace() for _ in range(3)])
        if how:
            assert recompute_activations(model, how) == 3
        model(torch.randn(4, 8)).square().sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_recomputing_keeps_less() -> None:
    """Bytes that backward holds on to, seen by a hook."""
    kept = {}
    for how in ("keep", "blocks"):
        model = decoder()
        if how != "keep":
            recompute_activations(model, how)
        held: list[int] = []

        def pack(tensor: Tensor, held: list[int] = held) -> Tensor:
            held.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(tokens(), tokens())
        kept[how] = sum(held)
    assert kept["blocks"] < 0.6 * kept["keep"]


def test_a_model_without_blocks_cannot_be_recomputed() -> None:
    with pytest.raises(InputError, match="the model has no repeated blocks"):
        recompute_activations(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "blocks")


def test_layers_stay_in_fp32_by_name_or_class() -> None:
    model = decoder()
    seen: dict[str, torch.dtype] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda m, args, out, name=name: seen.__setitem__(name, out.dtype))
    kept = keep_in_fp32(model, ["blocks.1.*", "head"])
    assert "blocks.1.attention.out" in kept
    assert "head" in kept
    average = Averaged(model, 0.5)
    for each in (model, average.module):
        seen.clear()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            each(tokens())
        assert seen["blocks.0.attention.out"] == torch.bfloat16
        assert seen["blocks.1.attention.out"] == seen["head"] == torch.float32


def test_a_pattern_that_fits_no_layer_is_told() -> None:
    with pytest.raises(InputError, match='"Conv9d" fits no layer'):
        keep_in_fp32(decoder(), ["Conv9d"])


def test_flops_are_the_known_ones(make_images: Any, tmp_path: Path) -> None:
    """ResNet-50 at 224 pixels: 4.09 billion multiply-adds forward, twice that backward (less the first layer's)."""
    job = small(make_images(), tmp_path / "run", model__name="resnet50", task__image_size=224)
    ready = prepare(job, read_machine(), lambda text: None)
    assert ready.arithmetic.flops_per_sample == pytest.approx(3 * 2 * 4.09e9, rel=0.02)


class Rows(nn.Module):
    """Blocks that hand on a row, or a row and how often it was changed."""

    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(1, 4)
        self.blocks = nn.ModuleList(block() for _ in range(7))

    def forward(self, x: Tensor) -> Tensor:
        given: Any = self.first(x)
        for block in self.blocks:
            given = block(*given) if isinstance(given, tuple) else block(given)
            assert isinstance(given, tuple) == isinstance(block, CountingRow)
        rows: Tensor = given[0] if isinstance(given, tuple) else given
        return rows[:, :1]


class Row(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        return self.down(self.up(x))


class CountingRow(Row):
    def forward(self, x: Tensor, count: int = 0) -> Any:
        return super().forward(x), count + 1


@pytest.mark.parametrize("block", [Row, CountingRow])
def test_flops_of_many_blocks_alike_are_those_of_all(block: type[nn.Module], make_images: Any, tmp_path: Path) -> None:
    task = Regression(small(make_images(), tmp_path / "run"))
    task.model = lambda: Rows(block)  # type: ignore[method-assign]
    dataset = task.data("train")
    of_a_row = 3 * 2 * (4 * 8 + 8 * 4)
    assert flops_per_sample(task, dataset, 0) == 2 * 2 * 4 + 7 * of_a_row


def test_flops_of_a_model_that_needs_numbers_are_unknown(make_images: Any, tmp_path: Path) -> None:
    task = Regression(small(make_images(), tmp_path / "run"))
    dataset = task.data("train")
    assert flops_per_sample(task, dataset, 0) == 4, "one product forward, one for the weight's gradient"
    task.loss = lambda outputs, batch: outputs.mean() * outputs.max().item()  # type: ignore[method-assign]
    assert flops_per_sample(task, dataset, 0) == 0


def test_mfu_is_a_share_of_the_matrix_rate() -> None:
    assert Arithmetic(2e9, 1e12).mfu(100) == pytest.approx(0.2)
    assert Arithmetic(0, 1e12).mfu(100) == Arithmetic(2e9, 0).mfu(100) == 0


def test_measuring_changes_nothing_that_is_drawn_afterwards() -> None:
    before = torch.get_rng_state()
    matrix_rate(torch.device("cpu"), "fp32")
    assert torch.equal(torch.get_rng_state(), before)


def test_the_matrix_rate_is_plausible() -> None:
    assert 1e9 < matrix_rate(torch.device("cpu"), "fp32") < 1e14


def test_what_auto_stands_for_is_said(make_images: Any, tmp_path: Path) -> None:
    job, choices = resolve(small(make_images(), tmp_path / "run"), read_machine())
    said = {choice.key: choice.why for choice in choices}
    assert job.precision == "fp32"
    assert said["precision"] == "fp32 is the CPU's own format"
    assert "data.workers" not in said, "the job says it"
    assert all(said.values())
    job, choices = choose_compile(job, 10**6, 1e12)
    assert (job.speed.compile, choices[0].why) == (False, "it is for GPUs")


def test_float8_needs_a_gpu_and_layers_that_fit() -> None:
    with pytest.raises(InputError, match='"float8" on a CPU'):
        choose_precision("float8", "cpu")


def test_float8_refuses_a_model_without_layers_for_it() -> None:
    pytest.importorskip("torchao", reason="float8 needs torchao, an extra")
    with pytest.raises(InputError, match="no linear layer for it"):
        use_float8(nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 30)))


@pytest.fixture
def _compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The processes that compile end with the test; what they find is kept out of the user's cache."""
    from torch._inductor.async_compile import shutdown_compile_workers

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()
    shutdown_compile_workers()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
@pytest.mark.usefixtures("_compiler")
def test_a_compiled_step_on_the_cpu_agrees() -> None:
    shape = Shape(2, 16, 2, 2, 32, llama=False, tied=True)
    ends = []
    for how in ("", "model", "blocks"):
        torch.manual_seed(0)
        model = Decoder(shape, 50, 8)
        step = Step(
            model, lambda model, batch: model(batch, batch), torch.optim.SGD(model.parameters(), lr=0.1),
            settings=StepSettings(compile=how),
        )  # fmt: skip
        ends.append([step(tokens()).item() for _ in range(3)])
    assert ends[1] == pytest.approx(ends[0], rel=1e-4)
    assert ends[2] == pytest.approx(ends[0], rel=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
@pytest.mark.usefixtures("_compiler")
def test_a_model_that_does_not_compile_whole_is_said_to() -> None:
    class Breaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.layer(x)
            print("what the compiler cannot hold", file=io.StringIO())
            return result * 2

    model, told = Breaks(), []
    step = Step(
        model, lambda model, batch: model(batch).mean(), torch.optim.SGD(model.parameters(), lr=0.1),
        settings=StepSettings(compile="model"), notify=told.append,
    )  # fmt: skip
    assert step(torch.ones(2, 4)).isfinite()
    step(torch.ones(2, 4))
    assert len(told) == 1
    assert told[0].startswith("torch.compile could not take the model in one piece: ")


class Noisy(nn.Module):
    """A user's block whose dropout is a function, not a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(nn.functional.dropout(self.first(x).relu(), 0.5, self.training))


def test_recomputed_blocks_draw_the_same_random_numbers() -> None:
    found = []
    for how in ("keep", "blocks"):
        torch.manual_seed(0)
        model = nn.Sequential(Noisy(), Noisy(), nn.Linear(8, 1))
        if how != "keep":
            recompute_activations(model, how)
        torch.manual_seed(1)
        model(torch.ones(4, 8)).sum().backward()
        found.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    assert torch.allclose(*found)


def test_blocks_with_batch_normalisation_are_not_recomputed() -> None:
    from torchvision import models

    with pytest.raises(InputError, match="the blocks hold batch normalisation"):
        recompute_activations(models.resnet18(), "blocks")


def test_wrapped_blocks_are_still_blocks_of_one_kind() -> None:
    model = decoder()
    recompute_activations(model, "blocks")
    assert [type(block).__name__ for block in repeated_blocks(model)] == ["Block"] * 3
