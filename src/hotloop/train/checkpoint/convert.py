"""A checkpoint's weights as one safetensors file, which any framework reads without running code."""

import shlex
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hotloop.core.errors import InputError, cannot_write
from hotloop.core.files import atomic, require_writable
from hotloop.core.units import format_bytes
from hotloop.train.checkpoint.checkpointer import Loaded
from hotloop.train.checkpoint.parts import StoredTensor, file_header

MODEL, AVERAGED, ALL = "model", "averaged", "all"
_SUFFIX = ".safetensors"
"""Programs go by the name's end: one that ends in .pt they read with torch.load."""


def convert(loaded: Loaded, out: Path, weights: str = MODEL, replace: bool = False) -> int:
    """Write the tensors of a checkpoint to a .safetensors file, whole or not at all.

    Of one that was loaded lazily a tensor at a time is in memory. Tied weights become copies of each other, as the
    format has them.

    Args:
        weights: "model": what is trained, under the model's own names; "averaged": the moving average of it; "all":
            every tensor of the state, the optimizer's too, under the path to it.
        replace: a file that is there.

    Returns:
        how many tensors there are.

    Raises:
        InputError: the checkpoint has no such weights or the format no such type, or the file is there already or
            cannot be there, or the disk has no room for it.
    """
    require_place(loaded.path, out, replace)
    chosen = dict(_chosen(loaded, weights))
    tensors = sorted(chosen.items(), key=lambda named: -named[1].dtype.itemsize)  # each can be read in place
    if not tensors:
        raise InputError(f"{loaded.path} has no tensors of this kind", f"asked for: {weights}", f"--weights {ALL}")
    described = {"format": "pt", "epoch": str(loaded.position[0]), "step": str(loaded.position[1]), "weights": weights}
    try:
        header = file_header([(name, one.dtype, one.shape) for name, one in tensors], described)
    except KeyError as error:
        cause = f"{loaded.path} has tensors of that type"
        raise InputError(f"safetensors files hold no {error}", cause, f"--weights {MODEL}") from None
    _require_room(out, len(header) + sum(one.dtype.itemsize * one.shape.numel() for _, one in tensors))
    try:
        with atomic(out) as file:
            file.write(header)
            for _, one in tensors:
                file.write(_bytes_of(one.whole() if isinstance(one, StoredTensor) else one))
    except OSError as error:
        raise cannot_write(out, error, InputError, "name another OUT") from None
    return len(tensors)


def require_place(path: Path | str, out: Path, replace: bool) -> None:
    """Refuse, before a large checkpoint is read, what could not be written after it.

    Args:
        path: what is converted.

    Raises:
        InputError: the file is there already, cannot be there, or has a name of another format.
    """
    if out.suffix != _SUFFIX:
        stem = out.stem if out.suffix[1:].isalpha() else out.name  # llama-3.2 is a name
        better = shlex.quote(str(out.with_name(f"{stem}{_SUFFIX}")))
        cause = f"weights are written as safetensors, and programs take a file for what its name ends in, {_SUFFIX}"
        raise InputError(f"{out} is no name for them", cause, f"{_command(path)} {better}")
    if not out.parent.exists():
        make = f"mkdir -p {shlex.quote(str(out.parent))}"
        raise InputError(f"{out} cannot be written", f"there is no folder {out.parent}", make)
    if out.exists() and not replace:
        raise InputError(f"{out} is there already", "it is not written over unasked", "--force, or another name")
    require_writable(out, _command(path))


def _command(path: Path | str) -> str:
    return f"hotloop checkpoint convert {shlex.quote(str(path))}"


def _require_room(out: Path, size_bytes: int) -> None:
    if (free := shutil.disk_usage(out.parent).free) < size_bytes:
        cause = f"it takes {format_bytes(size_bytes)}, and {format_bytes(free)} are free in {out.parent.absolute()}"
        raise InputError(f"{out} has no room", cause, "free some space, or name another OUT")


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy().data


def _chosen(loaded: Loaded, weights: str) -> Iterator[tuple[str, Tensor | StoredTensor]]:
    state: Any = loaded.state
    if weights == ALL:
        return _flat(state)
    step = state.get("step")  # of a loop of somebody's own this is a number
    inside = step if isinstance(step, Mapping) else state
    found = inside.get(weights, {})
    return _flat(found.get("module", {}) if weights == AVERAGED and isinstance(found, Mapping) else found)


def _flat(state: Any, path: str = "") -> Iterator[tuple[str, Tensor | StoredTensor]]:
    if isinstance(state, Tensor | StoredTensor):
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
