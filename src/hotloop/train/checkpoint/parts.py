"""What a state's large tensors become: parts in safetensors files, which any number of processes can read.

The files are those that `torch.distributed.checkpoint` calls Hugging Face's: its `HuggingFaceStorageReader` reads them.
"""

import copy
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

State = dict[str, Any]
Keys = tuple[Any, ...]
"""Of dicts and places in lists, from the outermost on."""

_SMALL_BYTES = 2**14
"""Tensors of less stay in `state.pt`: a hundred of them there are read faster than a hundred files' entries."""
_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
"""Of types in safetensors files: https://github.com/huggingface/safetensors#format"""
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_OFFSETS_KEY, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
"""Where torch.distributed.checkpoint looks for a part's place in its tensor."""


@dataclass(frozen=True)
class Part:
    """What this process writes of a tensor.

    Attributes:
        name: of the tensor, in files.
        tensor: the part, on its device.
        offset: its first element's indices in the whole tensor.
    """

    name: str
    tensor: Tensor
    offset: tuple[int, ...]


@dataclass(frozen=True)
class Split:
    """A state, taken apart.

    Attributes:
        rest: the state with None where a tensor was.
        entries: for the manifest: where which tensor belongs, and its shape and strides.
        parts: this process's.
        divided: whether tensors are divided among processes, so that each has a part to write.
    """

    rest: State
    entries: list[dict[str, Any]]
    parts: list[Part]
    divided: bool


def split(state: State, first: bool = True) -> Split:
    """Take a state's large and divided tensors out of it.

    Args:
        first: whether this process writes what is not divided.
    """
    entries: list[dict[str, Any]] = []
    parts: list[Part] = []
    names: dict[Any, str] = {}
    taken = {"__metadata__"}

    def take_out(path: Keys, leaf: Any) -> Any:
        divided = isinstance(leaf, DTensor)
        if not divided and not (_is_large(leaf) and all(isinstance(key, str | int) for key in path)):
            return _with_own_memory(leaf)
        same = _identity(leaf)
        if same not in names:
            name = names[same] = _free_name(path, taken)
            taken.add(name)
            parts.extend([_own_part(name, leaf)] if divided else [Part(name, leaf, (0,) * leaf.ndim)] if first else [])
        entries.append(_entry(path, names[same], leaf))
        return None

    rest = mapped(take_out, state)
    divided = any(entry["mesh"] for entry in entries)
    return Split(rest, entries, [one for one in parts if one.tensor.numel()], divided)


def mapped(function: Callable[[Keys, Any], Any], value: Any, path: Keys = ()) -> Any:
    """A state with `function(keys to it, leaf)` in place of each leaf; dicts keep their type and what they carry, as
    `state_dict()` has its modules' versions with it.
    """
    if isinstance(value, dict):
        found = copy.copy(value)
        for key, inner in value.items():
            found[key] = mapped(function, inner, (*path, key))
        return found
    if isinstance(value, list | tuple):
        inside = [mapped(function, inner, (*path, number)) for number, inner in enumerate(value)]
        return type(value)(*inside) if hasattr(value, "_fields") else type(value)(inside)
    return function(path, value)


def _is_large(leaf: Any) -> bool:
    if type(leaf) is not Tensor or leaf.layout is not torch.strided or leaf.dtype not in _NAMES:
        return False
    return leaf.nbytes >= _SMALL_BYTES and not leaf.requires_grad and not leaf.is_meta


def _with_own_memory(leaf: Any) -> Any:
    """A small tensor without the large one that it is a view of: torch saves all of that."""
    if type(leaf) is Tensor and leaf.layout is torch.strided and leaf.untyped_storage().nbytes() >= _SMALL_BYTES:
        return leaf.clone() if leaf.nbytes < _SMALL_BYTES else leaf
    return leaf


def _identity(tensor: Tensor) -> Any:
    """The same for tensors that are one: tied weights are written once."""
    if isinstance(tensor, DTensor):
        return id(tensor) if not tensor.to_local().numel() else (tensor.to_local().data_ptr(), tensor.shape)
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _free_name(path: Keys, taken: set[str]) -> str:
    name = ".".join(str(part) for part in path)
    while name in taken:
        name += "_"
    return name


def _entry(path: Keys, name: str, tensor: Tensor) -> dict[str, Any]:
    """What the manifest says of a tensor: how it is divided, not where each of thousands of parts is."""
    mesh: tuple[int, ...] = ()
    placements: tuple[tuple[int, ...], ...] = ()
    ranks: list[int] = []
    if isinstance(tensor, DTensor):
        mesh, placements = tuple(tensor.device_mesh.shape), tuple(map(_placement, tensor.placements))
        ranks = _ranks_of(tensor.device_mesh)
    return {
        "path": path, "name": name, "dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape),
        "stride": _stride(tensor), "mesh": mesh, "placements": placements, "ranks": ranks,
    }  # fmt: skip


@lru_cache(maxsize=16)
def _ranks_of(mesh: DeviceMesh) -> list[int]:
    """Row by row; empty if they are all there are, in order, as a rule."""
    ranks: list[int] = mesh.mesh.flatten().tolist()
    return [] if ranks == list(range(len(ranks))) else ranks


def _placement(placement: Placement) -> tuple[int, ...]:
    """As numbers: of a copy none, of a part its dimension, and of one that is cut again inside into how many."""
    if isinstance(placement, _StridedShard):
        return (placement.dim, int(placement.split_factor))
    return (placement.dim,) if isinstance(placement, Shard) else ()


@dataclass(frozen=True)
class Layout:
    """Where the parts of a tensor are.

    Attributes:
        files: for each part, the number of its file.
        starts, ends: its first indices in the whole tensor, and those after its last.
    """

    files: np.ndarray
    starts: np.ndarray
    ends: np.ndarray


@lru_cache(maxsize=4096)
def layout_of(shape: tuple[int, ...], mesh: tuple[int, ...], placements: tuple[tuple[int, ...], ...]) -> Layout:
    """Of a tensor that a mesh of ranks, row by row, has divided; without one it is in the first file.

    Worked out for all ranks at once: torch's own rule for one rank takes 1 ms for each tensor that was cut twice, which
    for 8,192 ranks made minutes.
    """
    ranks = int(np.prod(mesh, dtype=np.int64))
    coordinates = np.indices(mesh).reshape(len(mesh), ranks)
    starts, sizes = np.zeros((ranks, len(shape)), np.int64), np.tile(np.array(shape, np.int64), (ranks, 1))
    first_once = sorted(range(len(mesh)), key=lambda axis: len(placements[axis]))  # what is cut again inside comes last
    for axis in (axis for axis in first_once if placements[axis]):
        dimension = placements[axis][0]
        each = -(-sizes[:, dimension] // mesh[axis])
        begins = np.minimum(each * coordinates[axis], sizes[:, dimension])
        starts[:, dimension] += begins
        sizes[:, dimension] = np.minimum(each, sizes[:, dimension] - begins)
    copies = [coordinates[axis] > 0 for axis in range(len(mesh)) if not placements[axis]]
    kept = sizes.all(axis=1) & ~np.any(copies, axis=0) if copies else sizes.all(axis=1)
    return Layout(np.flatnonzero(kept), starts[kept], (starts + sizes)[kept])


def _stride(tensor: Tensor) -> list[int]:
    """Of a tensor whose elements lie in another order than its indices, channels_last say; empty for others."""
    if isinstance(tensor, DTensor) or tensor.is_contiguous():
        return []
    strides = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda axis: -strides[axis])
    return list(strides) if tensor.permute(order).is_contiguous() else []


def _own_part(name: str, tensor: DTensor) -> Part:
    """What this rank has of a divided tensor; nothing if others have the same and come first."""
    local, coordinate = tensor.to_local(), list(tensor.device_mesh.get_coordinate() or ())
    copies = [at for at, how in zip(coordinate, tensor.placements, strict=True) if isinstance(how, Replicate)]
    if any(copies) or not local.numel():
        return Part(name, local.flatten()[:0], ())
    return Part(name, local, place_of(tensor)[0])


def place_of(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The first indices, in the whole tensor, of what this rank has of it, and the shape of that."""
    mesh, local = tensor.device_mesh, tensor.to_local()
    layout = layout_of(tuple(tensor.shape), tuple(mesh.shape), tuple(map(_placement, tensor.placements)))
    coordinate = list(mesh.get_coordinate() or ())
    parts = [
        at if isinstance(how, Shard | _StridedShard) else 0
        for at, how in zip(coordinate, tensor.placements, strict=True)
    ]
    found = np.flatnonzero(layout.files == np.ravel_multi_index(parts, mesh.shape))
    start = layout.starts[found[0]].tolist() if len(found) else [0] * tensor.ndim
    return tuple(start), tuple(local.shape)


def header(parts: Sequence[Part]) -> bytes:
    """Of the file that holds these parts one after another."""
    places = json.dumps({part.name: {_OFFSETS: list(part.offset)} for part in parts})
    tensors = [(part.name, part.tensor.dtype, part.tensor.shape) for part in parts]
    return file_header(tensors, {"format": "pt", _OFFSETS_KEY: places})


def file_header(tensors: Iterable[tuple[str, torch.dtype, torch.Size]], metadata: dict[str, str]) -> bytes:
    """Of a safetensors file that holds tensors of these names, types and shapes one after another.

    Raises:
        KeyError: the format has no such type.
    """
    described: dict[str, Any] = {"__metadata__": metadata}
    start = 0
    for name, dtype, shape in tensors:
        end = start + shape.numel() * dtype.itemsize
        described[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def in_file_order(parts: Sequence[Part]) -> list[Part]:
    """Wide types first, so that each part lies where its type can be read in place."""
    return sorted(parts, key=lambda part: -part.tensor.element_size())


class StoredTensor:
    """A tensor in a checkpoint's files, of which as much is read as is asked for."""

    def __init__(self, files: "PartFiles", entry: dict[str, Any]) -> None:
        self.shape = torch.Size(entry["shape"])
        self.dtype = _DTYPES[entry["dtype"]]
        self._files = files
        self._name = entry["name"]
        self._stride = entry["stride"]
        self._ranks = entry["ranks"]
        self._divided = tuple(entry["mesh"]), tuple(map(tuple, entry["placements"]))

    def whole(self) -> Tensor:
        """All of it, on the CPU, its elements in the order that they were saved in."""
        found = self.part((0,) * len(self.shape), self.shape)
        return torch.empty_strided(self.shape, self._stride, dtype=found.dtype).copy_(found) if self._stride else found

    def part(self, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """The elements from `offset` on, (*shape), on the CPU; only the files that hold some of them are opened."""
        layout = layout_of(tuple(self.shape), *self._divided)
        first, last = np.array(offset, int), np.array(offset, int) + np.array(shape, int)
        lows, highs = np.maximum(layout.starts, first), np.minimum(layout.ends, last)
        found: Tensor | None = None
        for number in np.flatnonzero((highs > lows).all(axis=1)):
            low, high, start = (all_parts[number].tolist() for all_parts in (lows, highs, layout.starts))
            index = int(layout.files[number])
            file = self._ranks[index] if self._ranks else index
            block = self._files.read(file, self._name, _slices(low, high, start))
            if list(block.shape) == list(shape):
                return block.clone()  # else it is the file's memory, and keeps the file
            found = block.new_empty(tuple(shape)) if found is None else found
            found[tuple(_slices(low, high, offset))] = block
        return torch.empty(tuple(shape), dtype=self.dtype) if found is None else found


def _slices(low: Sequence[int], high: Sequence[int], origin: Sequence[int]) -> list[slice]:
    return [slice(start - zero, end - zero) for start, end, zero in zip(low, high, origin, strict=True)]


class PartFiles:
    """The files of a checkpoint's parts, opened when they are asked for: of thousands, a rank needs a few."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self._folder = folder
        self._names = sorted(names)
        self._opened: dict[int, Any] = {}

    def read(self, file: int, name: str, slices: Sequence[slice]) -> Tensor:
        """Elements of the part of a tensor that a file has, by indices in that part."""
        if file not in self._opened:
            self._opened[file] = safe_open(self._folder / self._names[file], framework="pt")
        block: Tensor = self._opened[file].get_slice(name)[tuple(slices)]
        return block


def join(rest: State, folder: Path, entries: Sequence[dict[str, Any]], files: Sequence[str]) -> State:
    """The state that was taken apart, with a `StoredTensor` where a tensor was."""
    opened = PartFiles(folder, files)
    stored = {tuple(entry["path"]): StoredTensor(opened, entry) for entry in entries}
    found: State = mapped(lambda path, leaf: stored.pop(path, leaf) if leaf is None else leaf, rest)
    if stored:
        raise ValueError(f"state.pt has no place for {next(iter(stored))}")
    return found


def read_whole(state: Any) -> Any:
    """The same with each stored tensor read."""
    return mapped(lambda path, leaf: leaf.whole() if isinstance(leaf, StoredTensor) else leaf, state)
