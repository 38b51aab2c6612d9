"""What a step that runs as it stands allocates and computes, operator by operator."""

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from hotloop.plan.footprint import Cost, Moment

_ROUNDED_TO = 512
"""Bytes of which torch's allocator gives multiples. Source: c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize."""
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_CROSS_ENTROPY = "hotloop::linear_cross_entropy"
_FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"
_UNCOUNTED = ("empty", "detach", "alias", "lift")


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the memory of the tensors that are made within, by the phase in which they were.

    Args:
        weights: of the model, and its buffers. What is made of them alone in forward, and what has the shape of one in
            backward, is as large with any batch.

    Attributes:
        phase: under which what is made next is counted.
        costs: of what was computed.
    """

    def __init__(self, weights: Sequence[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fixed = {tensor.untyped_storage()._cdata for tensor in weights}
        self._shapes = {tensor.shape for tensor in weights}
        self._sides = {sides(tensor) for tensor in weights}
        self.phase = "state"
        self.costs: list[Cost] = []
        self._held: dict[int, tuple[tuple[str, bool], int, Any]] = {}
        self._bytes: Counter[tuple[str, bool]] = Counter()
        self._moments: list[Moment] = []

    @contextmanager
    def watched(self) -> Iterator[list[Moment]]:
        """The moments within, one for each tensor that was made."""
        self._moments = [self._moment()]
        yield self._moments

    def count_as(self, tensor: Tensor, phase: str) -> None:
        """What a tensor takes belongs to another phase than the one that it was made in."""
        key = tensor.untyped_storage()._cdata
        before, size, reference = self._held[key]
        self._held[key] = (phase, before[1]), size, reference
        self._bytes[before] -= size
        self._bytes[phase, before[1]] += size

    def bytes_of(self, phase: str) -> int:
        """What is held of a phase now."""
        return self._bytes[phase, True] + self._bytes[phase, False]

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        outputs = operator(*args, **(kwargs or {}))
        logits = logits_of(operator, args)
        made = [value for value in tree_leaves(outputs) if isinstance(value, Tensor)]
        read = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        of_weights = bool(read) and all(tensor.untyped_storage()._cdata in self._fixed for tensor in read)
        for tensor in made:
            like_one = tensor.shape in self._shapes and (self.phase != "activations" or is_cross_entropy(operator))
            self._hold(tensor, like_one or of_weights)
        scratch = scratch_of(operator, args)
        if logits or scratch:
            self._note(logits, scratch)
        if cost := cost_of(operator, args, kwargs or {}, outputs, read, made, self._sides):
            self.costs.append(cost)
        return outputs

    def _hold(self, tensor: Tensor, fixed: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._held or key in self._fixed:
            return
        if fixed:
            self._fixed.add(key)
        size = -(-storage.nbytes() // _ROUNDED_TO) * _ROUNDED_TO
        self._held[key] = (self.phase, fixed), size, weakref.ref(storage, lambda _: self._gone(key))
        self._bytes[self.phase, fixed] += size
        self._note()

    def _note(self, logits: int = 0, scratch: int = 0) -> None:
        self._moments.append(self._moment(logits, scratch))

    def _moment(self, logits: int = 0, scratch: int = 0) -> Moment:
        of = self._bytes
        fixed = of["activations", True], of["temporary", True]
        gradients = of["gradients", True] + of["gradients", False]
        temporary = of["temporary", False] + fixed[1] + scratch
        return Moment(of["activations", False] + fixed[0], gradients, temporary, *fixed, logits)

    def _gone(self, key: int) -> None:
        kind, size, _ = self._held.pop(key)
        self._bytes[kind] -= size
        self._fixed.discard(key)


def bytes_of(tensor: Tensor) -> int:
    """What reading or writing a tensor moves; an expanded one is as large as what it was expanded from."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def sides(tensor: Tensor) -> tuple[int, ...]:
    """Of a tensor as it lies or transposed: by them a weight and its gradient are known."""
    return tuple(sorted(tensor.shape))


def cost_of(
    operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any, read: list[Tensor], made: list[Tensor],
    weights: Set[tuple[int, ...]],
) -> Cost | None:  # fmt: skip
    """What an operator costs on a GPU; nothing if it launches no kernel.

    Args:
        weights: the sides of all weights.
    """
    schema = operator._schema
    if any(result.alias_info is not None and not result.alias_info.is_write for result in schema.returns):
        return None
    if schema.name.split("::")[1].startswith(_UNCOUNTED):
        return None
    if not made and not schema.is_mutable:  # asks a tensor for its device, say
        return None
    moved = sum(map(bytes_of, [*read, *made]))
    fixed = sum(bytes_of(tensor) for tensor in (*read, *made) if sides(tensor) in weights)
    if schema.is_mutable and not made:  # optimizers write what they read
        moved *= 2
    floating = next((tensor.dtype for tensor in read if tensor.is_floating_point()), torch.float32)
    name = _NAMES.get(floating, str(floating).removeprefix("torch."))
    if schema.name == _CROSS_ENTROPY:
        hidden_ND, weight_VD = read[:2]
        return Cost("matrix", name, 6.0 * hidden_ND.numel() * weight_VD.shape[0], moved, 1, fixed)  # three products
    if schema.name.startswith(_FLASH):
        return Cost("attention", name, _attention_flops(args), moved, 1, fixed)
    count = flop_registry.get(operator.overloadpacket)
    if count is None:
        return Cost("memory", name, 0.0, moved, 1, fixed)
    flops = count(*args, **kwargs, out_val=outputs)
    return Cost("convolution" if "conv" in schema.name else "matrix", name, float(flops), moved, 1, fixed)


def _attention_flops(args: tuple[Any, ...]) -> float:
    """Of attention's kernel forward or backward; what a causal mask hides is not computed.

    By hand, as torch 2.11's own count refuses fewer heads of keys than of queries.
    """
    shapes = [value.shape for value in args if isinstance(value, Tensor)]
    causal = any(value is True for value in args)  # the only flag that is set; left out where it is not
    backward = len(shapes) >= 6
    query, key, value = shapes[1:4] if backward else shapes[:3]
    samples, heads, queries, width = query
    # Forward scores and their sums of values; backward scores again, and four gradients.
    numbers = 3 * width + 2 * value[-1] if backward else width + value[-1]
    flops = 2.0 * samples * heads * queries * key[2] * numbers
    return flops / 2 if causal else flops


def logits_of(operator: Any, args: tuple[Any, ...]) -> int:
    """Bytes of the logits of our cross entropy, which are there while it runs; 0 for all other operators."""
    if not is_cross_entropy(operator):
        return 0
    hidden_ND, weight_VD = args[:2]
    return int(hidden_ND.shape[0] * weight_VD.shape[0] * weight_VD.element_size())


def scratch_of(operator: Any, args: tuple[Any, ...]) -> int:
    """Bytes that attention's backward holds while it runs in 16 bits: the queries' gradient added up in fp32; where
    fewer heads have keys, the gradients of keys and values for each head of queries. 0 for all other operators.

    Seen as 1.70 GiB of Llama 3.2 1B with 27 × 4096 tokens on an H200, torch 2.11.
    """
    if not isinstance(operator, torch._ops.OpOverload) or operator._schema.name != f"{_FLASH}_backward":
        return 0
    query, key = args[1:3]
    if query.element_size() > 2:
        return 0
    spread = 2 * query.element_size() if key.shape[1] < query.shape[1] else 0
    return int(query.numel() * (4 + spread))


def is_cross_entropy(operator: Any) -> bool:
    """Whether an operator is ours, that gives losses and both gradients."""
    return isinstance(operator, torch._ops.OpOverload) and operator._schema.name == _CROSS_ENTROPY
