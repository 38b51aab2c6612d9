"""Our kernels without a GPU: Triton's interpreter runs them, in a process of its own, against the plain layers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torchvision import models

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
