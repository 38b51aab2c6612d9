"""Which models can be divided among ranks, and in which parts."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from hotloop.core.errors import InputError
from hotloop.core.job import Job
from hotloop.core.job_file import parse_job
from hotloop.tasks.transformers import build_decoder
from hotloop.train.blocks import gathered_apart
from hotloop.train.resolve import choose_parallel, state_bytes
from hotloop.train.sharded import Types, divide, indivisible, whole
from hotloop.train.world import World, processes_for


def job_of(**raw: Any) -> Job:
    data = {"train": "images", **raw.pop("data", {})}
    return parse_job({"model": {"name": "resnet18"}, "device": "cpu", "data": data, **raw}, "job")


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


def test_a_team_of_one_asks_nothing_of_a_model() -> None:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "tensor"))
        model = tiny.perceptron()
        divide(model, mesh, Types(), layers=True)
        assert isinstance(model, FSDPModule)
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("name", ["gpt2", "llama-3-8b"])
def test_between_layers_of_several_ranks_nothing_travels_wider_than_they_compute(name: str) -> None:
    """Under autocast norms give float32: sent so it would be twice as much, and its gradient as well."""
    sizes = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 4, "hidden": 64}
    own_tokens = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(1), requires_grad=True)
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model = build_decoder(name, 50, 8, sizes)
        divide(model, init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor")), None, layers=True)
        with _Sent() as sent:
            with torch.autocast("cpu", torch.bfloat16):
                out = model.blocks[0](own_tokens)
            out.float().sum().backward()
    finally:
        distributed.destroy_process_group()
    activations = [tensor for tensor in sent.tensors if tensor.ndim == 3]
    assert {tuple(tensor.shape) for tensor in activations} == {(2, 4, 32), (4, 4, 32)}  # to gather, and to sum up
    assert {tensor.dtype for tensor in activations} == {torch.bfloat16}


class _Sent(TorchDispatchMode):
    """What messages are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional" and "tensor" in func.__name__ and "wait" not in func.__name__:
            self.tensors.append(args[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("make", "gigabytes", "parallel", "why"),
    [
        (tiny.perceptron, 80, "ddp", "of the GPU's"),
        (tiny.perceptron, 1e-6, "fsdp", "of the GPU's"),
        (tiny.tied, 1e-6, "ddp", ", and fsdp does not take weights that several of its blocks share"),
    ],
)
def test_weights_are_divided_where_a_gpu_has_no_room_for_them(
    make: Callable[[], nn.Module], gigabytes: float, parallel: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, int(gigabytes * 1e9)))
    job, [choice, _] = choose_parallel(job_of(device="cuda"), make(), World(size=2))
    assert (job.parallel, choice.value) == (parallel, parallel)
    assert why in choice.why


@pytest.mark.parametrize(
    ("section", "key", "value", "why"),
    [
        ("train", "ema", 0.9, "train.ema = 0.9"),
        ("optimizer", "name", "adafactor", 'optimizer.name = "adafactor"'),
        ("speed", "graph", True, "speed.graph = true"),
        ("model", "keep_fp32", ["head"], "model.keep_fp32"),
    ],
)
def test_weights_stay_whole_where_a_setting_needs_them_so(
    section: str, key: str, value: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever "auto" stands for is never refused afterwards."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 1000))
    asked = job_of(device="cuda")
    asked = asked.model_copy(update={section: getattr(asked, section).model_copy(update={key: value})})
    job, [choice, *_] = choose_parallel(asked, tiny.perceptron(), World(size=2))
    assert job.parallel == "ddp"
    assert f", and fsdp does not take {why}" in choice.why


def test_the_average_of_weights_needs_room_too() -> None:
    model, job = tiny.perceptron(), job_of(device="cuda")
    averaged = job.model_copy(update={"train": job.train.model_copy(update={"ema": 0.9})})
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert state_bytes(averaged, model) - state_bytes(job, model) == weights


@pytest.mark.parametrize(
    ("parallel", "tensor", "processes", "batch", "refused"),
    [
        ("tp", "auto", 2, 1, ""),
        ("fsdp+tp", 2, 4, 2, ""),
        ("fsdp+tp", 2, 4, 1, "data.batch_size = 1 is less than the 2 processes"),
        ("ddp", "auto", 2, 1, "data.batch_size = 1 is less than the 2 processes"),
        ("ddp", 2, 2, 8, 'ranks.tensor = 2 does not go with parallel = "ddp"'),
    ],
)
def test_ranks_that_compute_layers_together_share_samples(
    parallel: str, tensor: int | str, processes: int, batch: int, refused: str
) -> None:
    ranks, data = {"processes": processes, "tensor": tensor}, {"batch_size": batch}
    job = job_of(parallel=parallel, ranks=ranks, data=data)
    with pytest.raises(InputError, match=refused) if refused else nullcontext():
        assert processes_for(job) == processes


def test_gradients_within_layers_have_no_other_type() -> None:
    job = job_of(parallel="tp", ranks={"processes": 2, "gradients": "bf16"})
    with pytest.raises(InputError, match=r'ranks\.gradients = "bf16" does not go with parallel = "tp"'):
        processes_for(job)
