"""Our kernels without a GPU: Triton's interpreter runs them, in a process of its own, against the plain layers."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torchvision import models

from hotloop.kernels.convolution import search_algorithms, split_gradients
from hotloop.kernels.fuse import fused

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.mark.slow
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
        "not finite",
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


@pytest.mark.parametrize(
    ("dtype", "layout", "of_weight", "ours"),
    [
        (torch.bfloat16, torch.channels_last, torch.channels_last, 1),
        (torch.float16, torch.channels_last, torch.channels_last, 1),
        (torch.bfloat16, torch.contiguous_format, torch.channels_last, 0),
        (torch.bfloat16, torch.channels_last, torch.contiguous_format, 0),
        (torch.float32, torch.channels_last, torch.channels_last, 0),
    ],
)
def test_algorithms_are_searched_for_16_bits_with_channels_last(
    dtype: torch.dtype, layout: torch.memory_format, of_weight: torch.memory_format, ours: int
) -> None:
    def both(x: Tensor, weight: Tensor) -> Tensor:
        y = functional.conv2d(x, weight, padding=1)
        grads = torch.ops.aten.convolution_backward(
            y, x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]
        )
        with_bias = functional.conv2d(y, weight, torch.ones(16, dtype=dtype))
        return with_bias.sum() + grads[0].sum() + functional.conv1d(x[:, :, 0], weight[:, :, 0]).sum()

    x = torch.zeros(600, 16, 32, 32, dtype=dtype).contiguous(memory_format=layout)
    weight = torch.zeros(16, 16, 3, 3, dtype=dtype).contiguous(memory_format=of_weight)
    traced = make_fx(both, tracing_mode="fake")(x, weight)
    search_algorithms(traced.graph)
    split_gradients(traced.graph)
    traced.graph.lint()
    targets = [node.target for node in traced.graph.nodes]
    assert targets.count(torch.ops.hotloop.convolution.default) == ours
    assert targets.count(torch.ops.hotloop.convolution_backward.default) == ours


def test_weights_are_the_models_own() -> None:
    model = models.resnet18()
    ours = fused(model, torch.bfloat16)
    assert isinstance(ours, nn.Module)
    own = {id(parameter) for parameter in model.parameters()}
    assert {id(parameter) for parameter in ours.parameters()} == own


class Normed(nn.Module):
    """A layer that would be fused, if only its pass could be written down."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.BatchNorm2d(16)
        self.register_buffer("mean", torch.zeros(()))
        self.seen: Any = None

    def forward(self, x: Tensor) -> Tensor:
        surroundings: dict[str, Any] = {
            "without gradients": torch.no_grad, "saved otherwise": torch.autograd.graph.save_on_cpu,
            "other precision": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        }  # fmt: skip
        if self.kind == "decides" and x.sum() > 0:
            return x
        with surroundings.get(self.kind, nullcontext)():
            if self.kind == "recomputed":
                x = checkpoint(torch.tanh, x, use_reentrant=False)
            x = torch.tanh(x)
        y: Tensor = functional.relu(self.norm(x))
        if self.kind == "unused in place":
            self.mean.mul_(0.9).add_(y.mean())
        if self.kind == "read afterwards":
            z = x
            z += y
            y = z + x
        if self.kind == "sets":
            self.seen = y
        return y + torch.rand(1) if self.kind == "draws" else y


class Masked(Normed):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = super().forward(x)
        return y if mask is None else y * mask


@pytest.mark.parametrize(
    "kind",
    ["without gradients", "other precision", "saved otherwise", "recomputed", "decides", "unused in place",
     "read afterwards", "sets", "draws"],
)  # fmt: skip
def test_a_pass_that_a_graph_would_change_is_left_alone(kind: str) -> None:
    assert fused(Normed(), torch.bfloat16) is not None
    model = Normed(kind)
    assert fused(model, torch.bfloat16) is None
    assert model.seen is None


def test_models_with_optional_arguments_hooks_or_frozen_layers_are_left_alone() -> None:
    assert fused(Masked(), torch.bfloat16) is None
    hooked, frozen = Normed(), Normed()
    hooked.norm.register_forward_hook(lambda *_: None)
    assert fused(hooked, torch.bfloat16) is None
    frozen.norm.eval()
    assert fused(frozen, torch.bfloat16) is None
    assert fused(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.bfloat16) is None


@pytest.mark.parametrize("shape", [(2, 16, 1, 1), (1, 16, 4, 4), (2, 1, 4, 4), (16, 1, 1)])
def test_a_sum_of_other_shapes_is_left_to_the_plain_layers(shape: tuple[int, ...]) -> None:
    class Added(Normed):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
            return functional.relu(self.norm(x) + y)

    model = Added()
    ours = fused(model, torch.float32)
    assert ours is not None
    x, y = torch.randn(2, 16, 4, 4), torch.randn(shape)
    assert torch.equal(ours(x, y), model(x, y))
