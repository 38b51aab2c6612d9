"""Our kernels on the card, against the plain layers in float64, and in a whole network."""

import copy

import pytest
import torch
from fused_layers import all_cases
from torch import nn
from torch.nn import functional
from torchvision import models

from hotloop import Step, StepSettings


@pytest.mark.parametrize(("dtype", "most", "stem"), [(torch.float32, 1e-3, 0.05), (torch.bfloat16, 2e-2, 0.12)])
def test_the_operators_equal_the_plain_layers(dtype: torch.dtype, most: float, stem: float) -> None:
    """The stem's products are TF32's or bf16's: of nearly equal maxima it may choose another than float64."""
    errors = all_cases("cuda", dtype)
    for case, found in errors.items():
        allowed = stem if case.startswith("stem") else most
        assert max(found.values()) < allowed, (case, found)


@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_a_network_with_our_kernels_learns_as_without(name: str) -> None:
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = False
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
