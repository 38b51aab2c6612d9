"""Models that are divided among ranks: layers (tensor parallel), weights (FSDP2), or both; their states, whole."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from hotloop.core.errors import InputError
from hotloop.train.blocks import gathered_apart, repeated_blocks
from hotloop.train.checkpoint.parts import StoredTensor, place_of, read_whole
from hotloop.train.world import World


def mesh_of(world: World, device: str) -> DeviceMesh:
    """The ranks, row by row: those of a row compute layers together, those of a column divide weights."""
    # Each rank would say twice which messages gloo has not, and that a mesh of two dimensions takes two.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    return init_device_mesh(device, (world.data_size, world.tensor), mesh_dim_names=("data", "tensor"))


@dataclass(frozen=True)
class Types:
    """Of what travels between ranks that divide weights.

    Attributes:
        weights: that they compute in; None: their own.
        compress: gradients travel as bfloat16 too; as float32 otherwise.
    """

    weights: torch.dtype | None = None
    compress: bool = False

    @property
    def gradients(self) -> torch.dtype | None:
        return torch.bfloat16 if self.compress else torch.float32 if self.weights else None


def divide(model: nn.Module, mesh: DeviceMesh, types: Types | None, layers: bool) -> None:
    """Divide a model among ranks, in place.

    Args:
        mesh: of the ranks; a model on the meta device is divided as it would be on the mesh's.
        types: weights of a block are gathered before it computes, the next one's meanwhile, and given up after it
            (FSDP2), as these; None: weights are not divided.
        layers: neighbours compute each layer together (tensor parallel).

    Raises:
        InputError: the model cannot be divided so.
    """
    team = mesh["tensor"].size() if layers else 1
    check_divisible(model, weights=types is not None, team=team)
    if team > 1:
        divide_layers: Any = model.divide
        divide_layers(mesh["tensor"])
        _check_all_on_mesh(model)
    if types:
        _shard(model, mesh["data"], types)


def check_divisible(model: nn.Module, weights: bool, team: int) -> None:
    """Raise InputError if a model's weights cannot be divided among ranks, or its layers among so many."""
    if team > 1 and not hasattr(model, "divide"):
        raise InputError(
            f"{type(model).__name__} does not say how its layers are divided among ranks",
            "a model with tensor-parallel layers has a method divide(mesh)",
            "--set parallel=fsdp --set ranks.tensor=auto",
        )
    check_team: Callable[[int], None] | None = getattr(model, "check_team", None)
    if team > 1 and check_team:
        check_team(team)
    if weights and (found := indivisible(model)):
        raise InputError(f'parallel = "fsdp": the model has {found}', "they cannot be divided", "--set parallel=ddp")


def _check_all_on_mesh(model: nn.Module) -> None:
    """Raise InputError if `divide` has left weights that learn as they were.

    Optimizers and clipping take no plain weights beside those of a mesh. Where one does, and the weight's layer sees a
    rank's own tokens, gradients are of these alone: the ranks' copies drift apart.
    """
    named = model.named_parameters()
    left = [name for name, weight in named if weight.requires_grad and not isinstance(weight, DTensor)]
    if left:
        more = f" and {len(left) - 1} more" if left[1:] else ""
        layer = left[0].rpartition(".")[0] or "its layer"
        raise InputError(
            f"{type(model).__name__}.divide(mesh) leaves {left[0]}{more} as they were",
            "each weight that learns has to be on the mesh, divided or as a copy",
            f"name {layer} in the plan of parallelize_module, or freeze it",
        )


def _shard(model: nn.Module, mesh: DeviceMesh, types: Types) -> None:
    policy = MixedPrecisionPolicy(param_dtype=types.weights, reduce_dtype=types.gradients)
    for module in model.modules():
        if types.weights and isinstance(module, nn.modules.batchnorm._BatchNorm):  # with running statistics in float32
            fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
    for block in repeated_blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    for layer in gathered_apart(model):
        is_first = isinstance(layer, nn.Embedding)
        divided = fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=is_first)
        if is_first:  # no gradient of it depends on its weights
            divided.set_unshard_in_backward(False)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def indivisible(model: nn.Module) -> str:
    """The weights that FSDP2 does not take; empty if it takes all."""
    if not all(parameter.ndim for parameter in model.parameters()):
        return "weights without a dimension"
    blocks = repeated_blocks(model)
    inside = {module for block in blocks for module in block.modules()}
    outside = [module for module in model.modules() if module not in inside]
    groups = [{*block.parameters()} for block in blocks]
    groups.append({own for module in outside for own in module.parameters(recurse=False)})
    if sum(map(len, groups)) > len(set().union(*groups)):
        return "weights that several of its blocks share"
    for group in groups:
        types = sorted({str(weight.dtype).removeprefix("torch.") for weight in group if weight.requires_grad})
        if len(types) > 1:
            return f"weights of {' and '.join(types)} in one block"
    return ""


def is_sharded(model: nn.Module) -> bool:
    """Whether its weights are divided among ranks, gathered ones too."""
    gathered = any(isinstance(part, FSDPModule) for part in model.modules())
    return gathered or any(isinstance(parameter, DTensor) for parameter in model.parameters())


def local(parameter: Tensor) -> Tensor:
    """What this rank has of a tensor that may be divided."""
    part: Tensor = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return part


def whole(state: dict[str, Any]) -> dict[str, Any]:
    """The same with each divided tensor in one piece: on the first rank's host, an empty one on the others.

    All ranks have to ask for it. One tensor at a time is gathered on the device.
    """

    def gathered(tensor: DTensor) -> Tensor:
        full = tensor.full_tensor()
        return full.cpu() if distributed.get_rank() == 0 else torch.empty(0)

    found: dict[str, Any] = tree_map_only(DTensor, gathered, state)
    return found


def divided_model(state: dict[str, Any], model: nn.Module) -> dict[str, Tensor]:
    """A state of a model as this rank has it: of divided weights its own part, which is read, not sent.

    Args:
        state: whole tensors, the same on every rank; or such as are stored.
    """
    own = model.state_dict()
    return {name: _like(own.get(name), tensor) for name, tensor in state.items()}


def divided_optimizer(state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """The same for an optimizer."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    remembered = {
        number: {
            name: _like(parameters[number] if _belongs(value, parameters[number]) else None, value)
            for name, value in own.items()
        }
        for number, own in state["state"].items()
    }
    return {**state, "state": remembered}


def _belongs(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor | StoredTensor) and value.shape == parameter.shape and len(value.shape) > 0


def _like(own: Tensor | None, given: Any) -> Any:
    """A tensor, whole or stored, divided as `own` is."""
    if not isinstance(own, DTensor):
        return read_whole(given)  # some optimizers keep lists and dicts of tensors
    mesh, placements = own.device_mesh, own.placements
    if not isinstance(given, StoredTensor):
        return distribute_tensor(given.to(own.device), mesh, placements, src_data_rank=None)
    local = given.part(*place_of(own)).to(own.device)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=own.shape, stride=own.stride())
