"""Our kernels without a GPU: Triton's interpreter runs them, in a process of its own, against the plain layers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torchvision import models

from hotloop.kernels.convolution import split_gradients
from hotloop.kernels.fuse import fused

SUPPORT = Path(__file__).parents[1] / "support"


def test_the_operators_equal_the_plain_layers() -> None:
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "fused_layers.py"), "cpu", "float32"], capture_output=True, text=True,
        timeout=200, env={**os.environ, "TRITON_INTERPRET": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    errors = json.loads(done.stdout)
    assert set(errors) == {
        "relu 16",
        "relu 80",
        "shortcut 64",
        "both 128",
        "stem 18 x 21",
        "stem 33 x 16",
        "cross entropy",
    }
    assert max(error for case in errors.values() for error in case.values()) < 1e-5, errors


@pytest.mark.parametrize(
    ("name", "stems", "norms"),
    [
        ("resnet18", 1, 16),
        ("resnet50", 1, 48),
        ("densenet121", 1, 119),
        ("mobilenet_v2", 0, 0),
    ],
)
def test_known_networks_are_fused(name: str, stems: int, norms: int) -> None:
    with torch.device("meta"):
        ours = fused(models.get_model(name), torch.bfloat16)
    if not stems + norms:
        assert ours is None
        return
    assert isinstance(ours, nn.Module)
    names = [node.target for node in ours.graph.nodes if str(node.target).startswith("fused")]  # type: ignore[union-attr]
    assert sum(str(name).startswith("fused_stem") for name in names) == stems
    assert sum(str(name).startswith("fused_norm") for name in names) == pytest.approx(norms, abs=2)


@pytest.mark.parametrize(("images", "ours"), [(2, 1), (400, 0)])
def test_gradients_of_small_convolutions_go_side_by_side(images: int, ours: int) -> None:
    def backward(dy: Tensor, x: Tensor, weight: Tensor) -> list[Tensor | None]:
        gradients: list[Tensor | None] = torch.ops.aten.convolution_backward(
            dy, x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]
        )
        return gradients[:2]

    x, weight = torch.zeros(images, 16, 32, 32), torch.zeros(16, 16, 3, 3)
    traced = make_fx(backward, tracing_mode="fake")(x, x, weight)
    split_gradients(traced.graph)
    traced.graph.lint()
    targets = [node.target for node in traced.graph.nodes]
    assert targets.count(torch.ops.hotloop.convolution_backward.default) == ours
    assert targets.count(torch.ops.aten.convolution_backward.default) == 1 - ours


def test_weights_are_the_models_own() -> None:
    model = models.resnet18()
    ours = fused(model, torch.bfloat16)
    assert isinstance(ours, nn.Module)
    own = {id(parameter) for parameter in model.parameters()}
    assert {id(parameter) for parameter in ours.parameters()} == own


def test_what_cannot_be_traced_is_left() -> None:
    class Decides(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    assert fused(Decides(), torch.bfloat16) is None
    assert fused(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.bfloat16) is None
