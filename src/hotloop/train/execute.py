"""How the work of a batch is run: as it stands at first, then captured into a CUDA graph and replayed."""

import gc
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from hotloop.train.compiler import without_compiler
from hotloop.train.device_slots import Addresses, addresses
from hotloop.train.gate import LOADING, PATIENCE_SECONDS
from hotloop.train.pieces import release
from hotloop.train.probe import probe, where_raised

Work = Callable[[Any], Any]
"""Batch -> tensors, of a step its loss: everything that is done with a batch, updates included."""

_Key = tuple[Hashable, Hashable]
"""Place and shape."""

WARM_UP = 3
"""Calls as they stand before a capture: compilation, cuDNN's search and lazy allocations happen in them."""

_COMMON = 0.1
"""Share of all batches that a further shape must have to be compiled. A short last batch has less: one step an epoch
that is not compiled costs less than compiling it."""
_MOST_GRAPHS = 16


class Executor:
    """Runs work on batches, captured where that is possible.

    A graph is kept for each place (which part of a window this is, for example) and shape. Batches are copied to where
    it reads, unless they lie in rooms that batches are put into again and again: then each of these has a graph that
    reads there. Where the model is compiled, batches of a rare shape run uncompiled, and it is said once: nothing is
    compiled a second time in silence.

    Args:
        device: where the work runs; only CUDA captures.
        capture: whether to capture at all.
        compiled: whether the model is compiled.
        warm_up: calls of each place and shape before its capture.
        notify: told, in a line, what cannot be captured and why.
        capture_failed: called before work whose capture failed is run as it stands.

    Attributes:
        reason: why nothing is captured any more; empty while it may be.
        replays: calls that were replays of a graph.
        paused: work runs as it stands for now, and does not count as warm-up.
        objected: the work itself cannot be captured: it waits for the device, most often.
        computed: if there is one, recorded when work is queued that has read a batch.
        captures_alone: memory that runs out in a capture is no reason to repeat the work, as other ranks go on.
    """

    def __init__(
        self,
        device: torch.device,
        capture: bool,
        compiled: bool,
        warm_up: int,
        notify: Callable[[str], None],
        capture_failed: Callable[[], None] = lambda: None,
    ) -> None:
        self.reason = "" if capture else "switched off"
        self.replays = 0
        self.paused = self.captures_alone = self.objected = False
        self.computed: torch.cuda.Event | None = None
        self._plain = device.type != "cuda"
        self._compiled = compiled
        self._warm_up = warm_up
        self._notify = notify
        self._capture_failed = capture_failed
        self._graphs: dict[tuple[_Key, Addresses], _Graph] = {}
        self._calls: Counter[_Key] = Counter()
        self._shapes: Counter[Hashable] = Counter()
        self._common: set[Hashable] = set()
        self._numbers: set[tuple[Any, ...]] = set()
        self._numbers_change = False
        self._said: set[str] = set()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._pool: Any = None

    def run(self, place: Hashable, batch: Any, work: Work) -> Any:
        """Do `work` on `batch`; what comes back is overwritten by the next call of the same place and shape."""
        if self._plain:
            return work(batch)
        if self._numbers_change:
            return uncompiled(work, batch) if self._compiled else work(batch)
        leaves, spec = _flatten(batch)
        shape = (spec, *[_describe(leaf) for leaf in leaves])
        key = (place, shape)
        self._shapes[shape] += bool(leaves)
        rare = self._compiled and bool(leaves) and not self._is_common(shape)
        rooms = addresses(leaves)
        if graph := self._graphs.get((key, rooms)) or self._graphs.get((key, ())):
            self.replays += 1
            return graph.replay(leaves)
        if isinstance(spec, TreeSpec) and (self._compiled or not self.reason) and self._has_another_number(leaves):
            return self.run(place, batch, work)
        if rare:
            self._say_rare(shape)
            work = partial(uncompiled, work)
        if self.reason or self.paused:
            return work(batch)
        self._calls[key] += 1
        if self._calls[key] < self._warm_up:
            return self._on_side_stream(batch, work)
        if self._calls[key] == self._warm_up:
            return self._probed(batch, work)
        return self._captured(key, rooms, leaves, spec, work)

    @property
    def has_graphs(self) -> bool:
        """Whether something is captured at present."""
        return bool(self._graphs)

    def forget(self) -> None:
        """Drop all graphs: what they read or wrote has been replaced."""
        self._graphs.clear()
        self._calls.clear()
        self._shapes.clear()
        self._common.clear()

    def give_up(self, reason: str) -> None:
        """Capture nothing from now on, and say why."""
        self.reason = reason
        self._graphs.clear()
        self._say(f"the step is not captured into a CUDA graph: {reason}")

    def _is_common(self, shape: Hashable) -> bool:
        if shape in self._common:
            return True
        met = self._shapes[shape]
        if not self._common or (met >= 20 and met >= _COMMON * self._shapes.total()):
            self._common.add(shape)
            for key, rooms in [each for each in self._graphs if each[0][1] == shape]:
                del self._graphs[key, rooms], self._calls[key]  # captured while it was rare: not compiled
        return shape in self._common

    def _say_rare(self, shape: tuple[Any, ...]) -> None:
        tensors = _tensors_of(shape)
        if tensors in map(_tensors_of, self._common):
            self._say("batches that differ from the usual ones in a number are not compiled: make it a tensor")
            return
        sizes = ", ".join(str(tuple(size)) for size, *_ in tensors)
        self._say(f"batches of the rarer shape {sizes} are not compiled", key=str(tensors))

    def _has_another_number(self, leaves: Sequence[Any]) -> bool:
        """Whether there have been too many: a graph, and what is compiled, hold them as they are."""
        self._numbers.add(tuple(leaf for leaf in leaves if isinstance(leaf, _CONSTANTS)))
        if len(self._numbers) <= _MOST_GRAPHS:
            return False
        self._numbers_change = True
        change = "numbers in the batch change from step to step: make them tensors on the GPU"
        if self.reason:
            self._say(f"the step is not compiled: {change}")
        else:
            self.give_up(change)
        return True

    def _on_side_stream(self, batch: Any, work: Work) -> Any:
        """Run where the capture will be, as autograd remembers the stream of what it allocates."""
        assert self._stream is not None
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            output = work(batch)
        current.wait_stream(self._stream)
        return output

    def _probed(self, batch: Any, work: Work) -> Any:
        with probe() as found:
            output = self._on_side_stream(batch, work)
        found += [obstacle for leaf in tree_flatten(batch)[0] if (obstacle := _obstacle(leaf))]
        if found:
            self.objected = True
            self.give_up(found[0])
        return output

    def _captured(self, key: _Key, rooms: Addresses, leaves: Sequence[Any], spec: Hashable, work: Work) -> Any:
        if len(self._graphs) >= _MOST_GRAPHS:
            rooms = ()
        if not rooms and sum(not each for _, each in self._graphs) == _MOST_GRAPHS:
            self._say(f"{_MOST_GRAPHS} shapes are captured; further ones run as they stand")
            return self._on_side_stream(_unflatten(leaves, spec), work)
        assert self._stream is not None
        if not self._graphs:  # torch's allocator refuses a pool that has lost all of its graphs
            self._pool = torch.cuda.graph_pool_handle()
        try:
            graph = _Graph(leaves, spec, work, self._stream, self._pool, copies=not rooms)
        except torch.OutOfMemoryError as error:
            if not self.captures_alone:
                raise
            release(error)
            self.give_up("a graph has no room in memory")
            self._capture_failed()
            return self._on_side_stream(_unflatten(leaves, spec), work)
        except Exception as error:  # whatever the user's code or the driver says against it
            first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            self.give_up(f"{where_raised(error)}: {first_line}")
            self._capture_failed()
            return self._on_side_stream(_unflatten(leaves, spec), work)
        self._graphs[key, rooms] = graph
        self.replays += 1
        return graph.replay(leaves)

    def _say(self, text: str, key: str = "") -> None:
        if (key or text) not in self._said:
            self._said.add(key or text)
            self._notify(text)


def uncompiled(work: Work, batch: Any) -> Any:
    """Do work, nothing of it compiled."""
    with without_compiler():
        return work(batch)


class _Graph:
    """Work captured once: inputs that it reads from, an output that it writes to.

    Args:
        copies: whether batches are copied to inputs of its own, or always lie where these leaves do.
    """

    def __init__(
        self, leaves: Sequence[Any], spec: Hashable, work: Work, stream: torch.cuda.Stream, pool: Any, copies: bool
    ) -> None:
        self._copies = copies
        inputs = [leaf.clone() if copies and isinstance(leaf, Tensor) else leaf for leaf in leaves]
        # Rooms are not kept: the next ones may lie in the same place, and only a batch that lies there is replayed.
        self._inputs = inputs if copies else []
        self._graph = torch.cuda.CUDAGraph()
        # Thread-local: another thread (a logger, a checkpoint writer) may allocate meanwhile. The gate is for DALI: a
        # capture broke off while it decoded.
        graph = torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local")
        closed = LOADING.closed(PATIENCE_SECONDS)
        with closed, _undone_on_failure(stream.device, pool), _no_collection(), graph:
            self._output = work(_unflatten(inputs, spec))
        for leaf in tree_flatten(self._output)[0]:
            if isinstance(leaf, Tensor):
                leaf.is_room = True  # type: ignore[attr-defined]

    def replay(self, leaves: Sequence[Any]) -> Any:
        if self._copies:
            for own, given in zip(self._inputs, leaves, strict=True):
                if isinstance(own, Tensor):
                    own.copy_(given, non_blocking=True)
        self._graph.replay()
        return self._output


@contextmanager
def _no_collection() -> Iterator[None]:
    """A graph that the garbage collector frees during a capture breaks it off: collect before, and not inside."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _undone_on_failure(device: torch.device, pool: Any) -> Iterator[None]:
    """After a capture that broke off, torch goes on believing that it lasts: its stream stays the current one, every
    later random number is an error, and memory that streams share is never given back.
    """
    current = torch.cuda.current_stream(device)
    generator = torch.cuda.default_generators[device.index]
    before = generator.get_state()
    try:
        yield
    except BaseException:
        torch.cuda.set_stream(current)
        fresh = torch.Generator(device)
        fresh.set_state(before)
        generator.graphsafe_set_state(fresh)
        with suppress(RuntimeError):  # it did end
            torch._C._cuda_endAllocateToPool(device.index, pool)
        raise


def _flatten(batch: Any) -> tuple[Sequence[Any], Hashable]:
    """The parts of a batch and their structure; torch's own way takes 4 µs a step more for a plain dict."""
    if type(batch) is dict and all(type(value) is Tensor for value in batch.values()):
        return list(batch.values()), tuple(batch)
    return tree_flatten(batch)


def _unflatten(leaves: Sequence[Any], spec: Hashable) -> Any:
    if isinstance(spec, TreeSpec):
        return tree_unflatten(leaves, spec)
    assert isinstance(spec, tuple)
    return dict(zip(spec, leaves, strict=True))


def _describe(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return (leaf.shape, leaf.dtype, leaf.device)
    return leaf if isinstance(leaf, _CONSTANTS) else type(leaf)


def _tensors_of(shape: Any) -> list[Any]:
    return [part for part in shape if isinstance(part, tuple) and part and isinstance(part[0], torch.Size)]


_CONSTANTS = (bool, int, float, type(None))
"""Kinds of leaves that are a part of the shape: a graph holds them as they are."""


def _obstacle(leaf: Any) -> str:
    """Why a graph could not follow this part of a batch."""
    if isinstance(leaf, Tensor):
        return "" if leaf.device.type == "cuda" else "the batch is on the CPU: move it to the GPU before the step"
    kind = type(leaf).__name__
    return (
        ""
        if isinstance(leaf, _CONSTANTS)
        else f"the batch holds a {kind}: tensors in dicts, lists and tuples can be followed"
    )
