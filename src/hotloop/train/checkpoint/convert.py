"""A checkpoint's weights as one safetensors file, which any framework reads without running code."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from hotloop.core.errors import InputError
from hotloop.core.files import write_atomic
from hotloop.train.checkpoint.checkpointer import Loaded

MODEL, AVERAGED, ALL = "model", "averaged", "all"


def convert(loaded: Loaded, out: Path, weights: str = MODEL, replace: bool = False) -> dict[str, Tensor]:
    """Write the tensors of a checkpoint to a .safetensors file, whole or not at all.

    Args:
        weights: "model": what is trained, under the model's own names; "averaged": the moving average of it; "all":
            every tensor of the state, the optimizer's too, under the path to it.
        replace: a file that is there.

    Returns:
        the tensors by name, as they were written.

    Raises:
        InputError: the checkpoint has no such weights, or the file is there already.
    """
    if out.exists() and not replace:
        raise InputError(f"{out} is there already", "it is not written over unasked", "--force, or another name")
    tensors = {name: tensor.detach().contiguous() for name, tensor in _chosen(loaded, weights)}
    if not tensors:
        raise InputError(f"{loaded.path} has no tensors of this kind", f"asked for: {weights}", f"--weights {ALL}")
    described = {"format": "pt", "epoch": str(loaded.position[0]), "step": str(loaded.position[1]), "weights": weights}
    tensors = apart(tensors)
    write_atomic(out, save(tensors, described))
    return tensors


def _chosen(loaded: Loaded, weights: str) -> Iterator[tuple[str, Tensor]]:
    state: Any = loaded.state
    if weights == ALL:
        return _flat(state)
    step = state.get("step")  # of a loop of somebody's own this is a number
    inside = step if isinstance(step, Mapping) else state
    found = inside.get(weights, {})
    return _flat(found.get("module", {}) if weights == AVERAGED and isinstance(found, Mapping) else found)


def _flat(state: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(state, Tensor):
        yield path, state
    elif isinstance(state, Mapping):
        for name, value in state.items():
            yield from _flat(value, f"{path}.{name}" if path else str(name))
    elif isinstance(state, list | tuple):
        for number, value in enumerate(state):
            yield from _flat(value, f"{path}.{number}" if path else str(number))


def apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each with memory of its own, as the format has it: tied weights become copies of each other."""
    seen: set[int] = set()
    for name, tensor in tensors.items():
        where = tensor.untyped_storage().data_ptr()
        if where in seen or tensor.nbytes < tensor.untyped_storage().nbytes():
            tensors[name] = tensor.clone(memory_format=torch.contiguous_format)
        seen.add(where)
    return tensors
