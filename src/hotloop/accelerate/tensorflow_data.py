"""tf.data pipelines of a script: mapped in parallel, kept in memory, and fetched ahead, with the same elements in the
same order.
"""

from collections.abc import Callable
from importlib import import_module
from math import prod
from typing import Any

from hotloop.attach.patches import Patches

_HARMLESS = {
    "Assert", "Case", "If", "LookupTableFindV2", "LookupTableSizeV2", "PartitionedCall", "StatefulPartitionedCall",
    "While",
}  # fmt: skip
"""Operations that count as stateful, and change nothing: what they call is looked at as well."""
_FIXED = {
    "Batch", "Cache", "Concatenate", "FixedLengthRecord", "Map", "ParallelBatch", "ParallelMap", "Prefetch", "Range",
    "Skip", "TFRecord", "Take", "Tensor", "TensorSlice", "TextLine", "Zip",
}  # fmt: skip
"""Kinds of datasets that have the same elements in each pass, if what they map draws nothing."""


class Pipelines:
    """Changes what a script's datasets do when they are made and iterated over.

    Args:
        tf: the module tensorflow.
        parallel: whether to map in parallel and fetch ahead.
        cache_bytes: of memory that all caches together may take; 0: nothing is kept.

    Attributes:
        mapped: maps that run in parallel.
        left: maps that draw random numbers or run Python, where the order of calls matters.
        fetched: passes that are fetched ahead.
        cached: datasets that are kept.
        cache_bytes: that are left.
    """

    def __init__(self, tf: Any, parallel: bool, cache_bytes: int) -> None:
        self.mapped = self.left = self.fetched = self.cached = 0
        self.cache_bytes = cache_bytes
        self._tf = tf
        self._parallel = parallel
        self._patches = Patches()

    def install(self) -> None:
        self._patches.replace(self._tf.data.Dataset, "map", self._map)
        if self._parallel:
            self._patches.replace(self._tf.data.Dataset, "__iter__", self._iter)

    def remove(self) -> None:
        """Datasets that are made from now on are the script's own."""
        self._patches.undo()

    def _map(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def mapped(dataset: Any, function: Any, num_parallel_calls: Any = None, *rest: Any, **named: Any) -> Any:
            own = num_parallel_calls is not None or rest or named or not self._parallel
            size = getattr(dataset, "_hotloop_bytes", 0)
            source = dataset._input_dataset if size else dataset  # what is mapped again is kept behind that map only
            made = original(source, function, num_parallel_calls if own else self._tf.data.AUTOTUNE, *rest, **named)
            if _draws(made):
                self.left += not own
                return original(dataset, function, num_parallel_calls, *rest, **named) if size or not own else made
            self.mapped += not own
            self.cache_bytes += size
            self.cached -= bool(size)
            return self._kept(made)

        return mapped

    def _iter(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def iterated(dataset: Any) -> Any:
            if _kind(dataset) == "Prefetch":
                return original(dataset)
            self.fetched += 1
            return original(dataset.prefetch(self._tf.data.AUTOTUNE))

        return iterated

    def _kept(self, made: Any) -> Any:
        """With a cache behind it, if its elements are always the same and there is room for them."""
        size = self._bytes(made) if self.cache_bytes and _is_fixed(made) else 0
        if not 0 < size <= self.cache_bytes:
            return made
        kept = made.cache()
        kept._hotloop_bytes = size
        self.cache_bytes -= size
        self.cached += 1
        return kept

    def _bytes(self, dataset: Any) -> int:
        """Memory for all its elements; 0 if that cannot be known without reading them."""
        tf, elements = self._tf, int(dataset.cardinality())
        specs = tf.nest.flatten(dataset.element_spec)
        if elements < 1 or not all(isinstance(spec, tf.TensorSpec) and spec.shape.is_fully_defined() for spec in specs):
            return 0
        if any(spec.dtype in (tf.string, tf.variant, tf.resource) for spec in specs):
            return 0
        return sum(elements * prod(spec.shape) * int(spec.dtype.size) for spec in specs)


def _kind(dataset: Any) -> str:
    return type(dataset).__name__.strip("_").removesuffix("V2").removesuffix("Dataset")


def _draws(mapped: Any) -> bool:
    """Whether a map's function has a state: random numbers, Python, variables, or whatever is unknown here."""
    registry: Any = import_module("tensorflow.python.framework.op_def_registry")
    try:
        graph = mapped._map_func.function.graph.as_graph_def()
    except AttributeError:
        return True
    bodies = [graph.node, *[function.node_def for function in graph.library.function]]
    names = {node.op for body in bodies for node in body} - _HARMLESS
    called = {function.signature.name for function in graph.library.function}
    known = {name: registry.get(name) for name in names - called}
    return any(operation is None or operation.is_stateful for operation in known.values())


def _is_fixed(dataset: Any) -> bool:
    kind = _kind(dataset)
    if kind not in _FIXED or (kind.endswith("Map") and _draws(dataset)):
        return False
    return all(_is_fixed(each) for each in dataset._inputs())
