"""Our kernels on the card, against the plain layers in float64, and in a whole network."""

import copy

import pytest
import torch
from fused_layers import all_cases
from resampled import largest_error
from torch import Tensor, nn
from torch.nn import functional
from torchvision import models

from hotloop import Step, StepSettings
from hotloop.kernels import batch_norm_cooperative, batch_norm_ops, convolution, search


@pytest.mark.parametrize(("dtype", "most", "stem"), [(torch.float32, 1e-3, 0.05), (torch.bfloat16, 2e-2, 0.12)])
def test_the_operators_equal_the_plain_layers(dtype: torch.dtype, most: float, stem: float) -> None:
    """The stem's products are TF32's or bf16's: of nearly equal maxima it may choose another than float64."""
    errors = all_cases("cuda", dtype)
    for case, found in errors.items():
        allowed = stem if case.startswith("stem") else most
        assert max(found.values()) < allowed, (case, found)


Shape = tuple[int, int, int, int]


def norm_both_ways(shape: Shape, with_shortcut: bool, twice: bool) -> list[Tensor]:
    """Outputs and gradients of the operator, of numbers that a seed makes."""
    draws = torch.Generator("cuda").manual_seed(0)

    def image() -> Tensor:
        values = torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=draws)
        return values.contiguous(memory_format=torch.channels_last)

    x, shortcut, dy, dy2 = image() + 3, image(), image(), image()
    weight, bias, mean, var = torch.rand(4, shape[1], device="cuda", generator=draws) + 0.5
    given = shortcut if with_shortcut else None
    out, stats = batch_norm_ops.bn(x, weight, bias, mean, var, 0.1, 1e-5, given, True)
    kept = out if with_shortcut else None
    found = batch_norm_ops.bn_backward(dy, dy2 if twice else None, x, kept, stats, True)
    return [out, stats, *found]


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((3, 16, 5, 5), id="one program"),
        pytest.param((512, 64, 8, 8), id="every program a block of rows"),
        pytest.param((130, 80, 9, 9), id="a block that is not full"),
        pytest.param((256, 256, 8, 8), id="several blocks of rows"),
        pytest.param((512, 256, 8, 8), id="wide blocks"),
        pytest.param((512, 2048, 1, 1), id="many channels"),
    ],
)
@pytest.mark.parametrize("with_shortcut", [False, True])
def test_one_launch_does_what_several_do(monkeypatch: pytest.MonkeyPatch, shape: Shape, with_shortcut: bool) -> None:
    for twice in (False, True):
        together = norm_both_ways(shape, with_shortcut, twice)
        for _ in range(20):  # a race would not show each time
            again = norm_both_ways(shape, with_shortcut, twice)
            assert all(torch.equal(one, other) for one, other in zip(together, again, strict=True))
        monkeypatch.setattr(batch_norm_cooperative, "_SHARE_OF_L2", 0.0)
        apart = norm_both_ways(shape, with_shortcut, twice)
        monkeypatch.undo()
        for one, other in zip(together, apart, strict=True):
            distance = (one.double() - other.double()).norm() / other.double().norm()
            assert distance < 2e-3, (twice, distance)


def test_gradients_on_two_streams_are_those_of_one() -> None:
    draws = torch.Generator("cuda").manual_seed(0)
    x, weight = (torch.randn(64, 64, size, size, device="cuda", generator=draws).bfloat16() for size in (8, 3))
    x, weight = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (x, weight))
    dy = torch.randn_like(x)
    exact = torch.ops.aten.convolution_backward(
        dy.double(), x.double(), weight.double(), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]
    )
    for _ in range(50):
        found = convolution.convolution_backward(dy, x, weight, [1, 1], [1, 1], [1, 1], 1)
        for one, other in zip(found, exact, strict=False):
            assert (one.double() - other).norm() / other.norm() < 5e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("images", [64, 512])
def test_searched_convolutions_equal_plain_ones_captured_too(
    monkeypatch: pytest.MonkeyPatch, images: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr(search, "_ways", search._Ways())
    precision = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    draws = torch.Generator("cuda").manual_seed(0)
    shapes = (images, 64, 32, 32), (128, 64, 3, 3), (images, 128, 16, 16)
    x, weight, dy = (
        torch.randn(shape, device="cuda", generator=draws).to(dtype).contiguous(memory_format=torch.channels_last)
        for shape in shapes
    )
    how = ([2, 2], [1, 1], [1, 1], 1)

    def both() -> tuple[Tensor, ...]:
        return convolution.convolve(x, weight, *how), *convolution.convolution_backward(dy, x, weight, *how)

    exact = functional.conv2d(x.double(), weight.double(), None, *how)
    exact_gradients = torch.ops.aten.convolution_backward(
        dy.double(), x.double(), weight.double(), None, [2, 2], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]
    )
    first = both()
    assert len(search._ways.chosen) == 3
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    graph.replay()
    for found in (first, captured):
        for one, other in zip(found, (exact, *exact_gradients[:2]), strict=True):
            assert (one.double() - other).norm() / other.norm() < 5e-3
    assert torch.backends.cudnn.benchmark
    assert torch.backends.cudnn.conv.fp32_precision == precision  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
@pytest.mark.parametrize(("name", "searches"), [("resnet18", False), ("resnet50", False), ("resnet50", True)])
def test_a_network_with_our_kernels_learns_as_without(
    name: str, searches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", searches)
    first = models.get_model(name, num_classes=10).cuda().to(memory_format=torch.channels_last)
    images = torch.randn(32, 3, 64, 64, device="cuda").contiguous(memory_format=torch.channels_last)
    labels = torch.arange(32, device="cuda") % 10
    curves, ends = {}, {}
    for kind in ("fp32", "plain", "ours"):
        model = copy.deepcopy(first)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        settings = (
            StepSettings("fp32")
            if kind == "fp32"
            else StepSettings("bf16", compile="model", own_kernels=kind == "ours")
        )
        step = Step(model, lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]), optimizer,
                    settings=settings)  # fmt: skip
        curves[kind] = torch.tensor([step((images, labels)).item() for _ in range(25)])
        assert step.captured, step.not_captured
        ends[kind] = {key: value.clone() for key, value in model.state_dict().items()}
        model.eval()
        with torch.no_grad():
            assert model(images).isfinite().all()
    distance = {kind: (curves[kind] - curves["fp32"]).abs().mean().item() for kind in ("plain", "ours")}
    assert distance["ours"] < 2 * distance["plain"] + 0.05, (distance, curves)
    tracked = [key for key in ends["ours"] if key.endswith("num_batches_tracked")]
    assert all(int(ends["ours"][key]) == 25 for key in tracked)
    near = {
        kind: sum(
            torch.allclose(value, ends["fp32"][key], rtol=0.5, atol=0.05)
            for key, value in ends[kind].items() if key.endswith("running_var")
        )
        for kind in ("plain", "ours")
    }  # fmt: skip
    assert near["ours"] > 0.9 * near["plain"] - 1, near


def test_a_frozen_norm_and_evaluation_stay_plain() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 4)
    ).cuda()
    plain = copy.deepcopy(model)
    Step(model, lambda model, batch: model(batch).sum(), torch.optim.SGD(model.parameters(), lr=0.1),
         settings=StepSettings("bf16", compile="model", own_kernels=True))  # fmt: skip
    images = torch.randn(4, 3, 8, 8, device="cuda")
    model.eval(), plain.eval()
    with torch.no_grad():
        assert torch.allclose(model(images), plain(images), atol=1e-4)


@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
def test_kernels_of_ours_are_left_out_where_the_host_launches_each_and_is_late() -> None:
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)).cuda()
    told: list[str] = []
    step = Step(model, lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
                torch.optim.SGD(model.parameters(), lr=0.5), notify=told.append,
                settings=StepSettings("bf16", compile="model", graph=False))  # fmt: skip
    batch = torch.randn(8, 3, 16, 16, device="cuda"), torch.arange(8, device="cuda") % 4
    losses = [step(batch).item() for _ in range(20)]
    assert told == ["the GPU waits for the host: the model is compiled without hotloop's kernels"]
    assert losses == sorted(losses, reverse=True), "and it learns on"


def test_the_kernel_that_resizes_crops_is_the_filter() -> None:
    assert largest_error("cuda") < 1e-4
    assert largest_error("cuda", 224) < 1e-4
