"""tf.data pipelines of a script: mapped in parallel and kept in memory, with the same elements in the same order."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from math import prod
from typing import Any

import numpy

from hotloop.attach.patches import Patches

_HARMLESS = {
    "Assert", "Case", "If", "PartitionedCall", "StatefulPartitionedCall", "While",
}  # fmt: skip
"""Operations that count as stateful, and change nothing: what they call is looked at as well."""
_FIXED = {
    "Batch", "Cache", "Concatenate", "FixedLengthRecord", "Map", "ParallelBatch", "ParallelMap", "Prefetch", "Range",
    "Skip", "TFRecord", "Take", "Tensor", "TensorSlice", "TextLine", "Zip",
}  # fmt: skip
"""Kinds of datasets that have the same elements in each pass, if what they map draws nothing."""


_TENSOR_BYTES = 256
"""That a cached tensor takes besides its values: 175 to 255 were seen for single numbers."""


class Pipelines:
    """Changes what a script's datasets do when they are made outside of functions.

    Args:
        tf: the module tensorflow.
        parallel: whether to map in parallel.
        cache_bytes: of memory that all caches together may take; 0: nothing is kept.

    Attributes:
        mapped: maps that run in parallel.
        left: maps that draw random numbers or run Python, where the order of calls matters.
        cached: datasets that are kept.
        cache_bytes: that are left.
    """

    def __init__(self, tf: Any, parallel: bool, cache_bytes: int) -> None:
        self.mapped = self.left = self.cached = 0
        self.cache_bytes = cache_bytes
        self._tf = tf
        self._parallel = parallel
        self._active = False
        self._patches = Patches()

    def install(self) -> None:
        self._active = True
        self._patches.replace(self._tf.data.Dataset, "map", self._map)

    def remove(self) -> None:
        """Datasets that are made from now on are the script's own, also where somebody has replaced `map` since."""
        self._active = False
        self._patches.undo()

    def _map(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def mapped(dataset: Any, map_func: Any, num_parallel_calls: Any = None, *rest: Any, **named: Any) -> Any:
            made = original(dataset, map_func, num_parallel_calls, *rest, **named)
            if not self._active:
                return made
            own = num_parallel_calls is not None or rest or named or not self._parallel
            if not self._tf.executing_eagerly():
                return made
            if _draws(made):
                self.left += not own
                return made
            kept = getattr(dataset, "_hotloop_kept", False)
            source = dataset._input_dataset if kept else dataset  # what is mapped again is kept behind that map only
            if not own:
                self.mapped += 1
                with _draws_put_back():
                    made = original(source, map_func, self._tf.data.AUTOTUNE, deterministic=True)
            elif kept:
                with _draws_put_back():
                    made = original(source, map_func, num_parallel_calls, *rest, **named)
            self.cached -= kept
            return self._kept(made)

        converted: Callable[..., Any] = self._tf.autograph.experimental.do_not_convert(mapped)
        return converted

    def _kept(self, made: Any) -> Any:
        """With a cache behind it, if its elements are always the same and there is room for them."""
        size = self._bytes(made) if self.cache_bytes and _is_fixed(made) else 0
        if not 0 < size <= self.cache_bytes:
            return made
        kept = made.cache()
        kept._hotloop_kept = True
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
        return sum(elements * (_TENSOR_BYTES + prod(spec.shape) * int(spec.dtype.size)) for spec in specs)


@contextmanager
def _draws_put_back() -> Iterator[None]:
    """A function is traced a second time: what its Python draws then is not drawn from the script's numbers."""
    python, arrays = random.getstate(), numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        numpy.random.set_state(arrays)


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
