"""Which models can be divided among ranks, and in which parts."""

from collections.abc import Callable

import pytest
import tiny
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from hotloop.tasks.transformers import build_decoder
from hotloop.train.blocks import gathered_apart
from hotloop.train.sharded import Types, divide, indivisible, whole


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (tiny.perceptron, ""),
        (tiny.tied, "weights that several of its blocks share"),
        (tiny.doubled, "weights of float32 and float64 in one block"),
    ],
)
def test_what_speaks_against_dividing_weights_is_said(make: Callable[[], nn.Module], why: str) -> None:
    assert indivisible(make()) == why


@pytest.mark.parametrize(("name", "apart"), [("gpt2", 0), ("llama-3-8b", 2)])
def test_what_is_gathered_apart_learns_the_same(name: str, apart: int) -> None:
    """The embedding's weights are not gathered again for its gradient, those of the last layer stay for theirs."""
    sizes = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2 if apart else 4, "hidden": 64}
    tokens = torch.randint(0, 50, (3, 2, 9), generator=torch.Generator().manual_seed(1))

    def trained(divided: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = build_decoder(name, 50, 8, sizes)
        if divided:
            mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "tensor"))
            divide(model, mesh, Types(), layers=False)
            assert len(gathered_apart(model)) == apart
            assert all(isinstance(layer, FSDPModule) for layer in gathered_apart(model))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in tokens:
            model(batch[:, :-1], batch[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(batch[:, :-1])
        return list(whole(model.state_dict()).values())

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        found, expected = trained(True), trained(False)
    finally:
        distributed.destroy_process_group()
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
