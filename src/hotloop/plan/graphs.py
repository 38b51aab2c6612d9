"""What a compiled step keeps and moves: its two graphs, cut by torch's own partitioner, with a model of what is fused.

Nothing is generated: the compiler's rules are followed as far as memory is concerned. A result that only feeds
arithmetic number by number is not written down; what products, convolutions and attention read and give is.
"""

import copy
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch.fx.traceback import annotate, preserve_node_meta
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from hotloop.core.errors import HotloopError
from hotloop.plan.allocations import cost_of, is_cross_entropy, logits_of, scratch_of, sides
from hotloop.plan.footprint import COMPILED, Cost, Flow, Moment, fullest

_PART = "hotloop_recomputed"
_MOST_READS = 4
"""Sources from which a result that several read is written down.
Source: torch._inductor.config.realize_reads_threshold."""
_LONGEST_ROW = 8192
"""Numbers that a reduction keeps in registers until what depends on it has read them; longer rows are read again."""
_FUSED_NAMES = (
    "aten::full aten::full_like aten::iota prims::iota aten::arange aten::scalar_tensor aten::cat aten::embedding "
    "aten::gather aten::index aten::constant_pad_nd aten::rand aten::randn prims::inductor_random "
    "prims::inductor_seeds prims::inductor_lookup_seed aten::zeros aten::ones aten::zeros_like prims::device_put "
    "aten::copy aten::repeat aten::roll aten::flip aten::select_scatter aten::slice_scatter"
)
_FUSED = frozenset(_FUSED_NAMES.split())
"""Of what torch does not call pointwise, that which is computed where it is read."""


class _JointFound(Exception):
    """The graph is there: nothing needs to be compiled, or to run."""

    def __init__(self, joint: "Joint") -> None:
        super().__init__()
        self.joint = joint


class Joint:
    """Forward and backward as one graph, which is cut in two in one way or another."""

    def __init__(self, graph: fx.GraphModule, inputs: Any, settings: Mapping[str, Any]) -> None:
        self._graph = graph
        self._inputs = inputs
        self._settings = settings

    def cut(self, kept: Collection[Any] | None) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The graphs of forward and backward.

        Args:
            kept: of `recomputed` parts, the operators whose results are kept for backward all the same; None: they are
                cut as all else is.
        """
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        graph = fx.GraphModule(self._graph, copy.deepcopy(self._graph.graph))
        for node in graph.graph.nodes:
            part = node.meta.get("custom", {}).get(_PART)
            if kept is not None and part is not None and not node.meta.get("autograd_backward"):
                target = node.args[0].target if _is_item(node) else node.target
                keep = target in kept
                node.meta["ac_graph_id"] = part
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.MUST_RECOMPUTE
                if keep and _tensors(node) and not isinstance(node.meta["val"], Tensor):
                    del node.meta["recompute"]  # it is its parts that are kept
        graphs: tuple[fx.GraphModule, fx.GraphModule]
        # torch 2.11 looks for the fakes' mode where random numbers are recomputed; while it compiles, it finds it so.
        with tracing(TracingContext(detect_fake_mode(self._inputs))):
            graphs = min_cut_rematerialization_partition(graph, self._inputs, **self._settings)
        return graphs


def joint_of(function: Callable[..., Tensor], weights: Sequence[Tensor], rest: Sequence[Tensor]) -> Joint:
    """The graph of a function that gives a loss, with its gradients.

    Args:
        function: of two lists, `weights` and `rest`.
    """
    import torch._inductor.lowering  # noqa: F401  its decompositions look there; loading it takes two seconds
    from torch._functorch.aot_autograd import aot_function
    from torch._functorch.compilers import nop
    from torch._inductor.decomposition import select_decomp_table

    def capture(graph: fx.GraphModule, inputs: Any, **settings: Any) -> Any:
        raise _JointFound(Joint(graph, inputs, settings))

    traced = aot_function(function, nop, nop, capture, decompositions=select_decomp_table())
    try:
        with preserve_node_meta():
            traced(list(weights), list(rest))
    except _JointFound as found:
        return found.joint
    raise HotloopError("the step has no backward pass", "no weight of the model requires a gradient", "see the model")


@contextmanager
def recomputed(part: int) -> Iterator[None]:
    """What is computed within may be left out of what is kept for backward. Within `joint_of`, a part of the model."""
    with annotate({_PART: part}):
        yield


def flows_of(forward: fx.GraphModule, backward: fx.GraphModule, weights: int) -> tuple[Flow, Flow]:
    """Memory and kernels of both graphs; weights, buffers and the batch stay.

    Args:
        weights: how many of forward's arguments are weights and buffers; they come first.
    """
    first = _Plan(forward, {}, is_backward=False)
    arguments = list(forward.graph.find_nodes(op="placeholder"))
    fixed = _made_of(set(arguments[:weights]), first.nodes)
    kept = {name: None if source in arguments else source for name, source in first.named.items()}
    of_weights = [tensor for node in arguments[:weights] for tensor in _tensors(node)]
    shapes, known = {tensor.shape for tensor in of_weights}, {sides(tensor) for tensor in of_weights}
    second = _Plan(backward, kept, is_backward=True)
    alike = {node for node in second.nodes if any(tensor.shape in shapes for tensor in _tensors(node))}
    then = _flow(second, set(), fixed | (alike - set(second.given)), known)
    # What forward has as its results is kept for backward.
    return _flow(first, set(arguments), fixed, known, is_forward=True), then


def _made_of(weights: set[fx.Node], nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """What is computed from weights alone, or is the gradient of one from our cross entropy."""
    made = set(weights)
    for node in nodes:
        sources = node.all_input_nodes
        gradient = _is_item(node) and node.args[1] == 2 and is_cross_entropy(sources[0].target)
        if node.op == "call_function" and sources and (gradient or made.issuperset(sources)):
            made.add(node)
    return made


class _Held:
    """What is in memory, by what it is to the graph and whether it is as large with any batch.

    Args:
        scratch: bytes that the kernel which takes most of it has beside. They come to all moments: memory that is free
            is kept by the compiler for what will be as large, as long as no moment is fuller for it by what it knows.
    """

    def __init__(self, given: Set[fx.Node], results: Set[fx.Node], fixed: Set[fx.Node], scratch: int) -> None:
        self._scratch = scratch
        self.sizes: dict[fx.Node, int] = {}
        self._given, self._results, self._fixed = given, results, fixed
        self._bytes: Counter[tuple[str, bool]] = Counter()
        for node in given:
            self.add(node)

    def add(self, node: fx.Node) -> None:
        self.sizes[node] = _size(node)
        self._bytes[self._kind(node)] += self.sizes[node]

    def drop(self, node: fx.Node) -> None:
        self._bytes[self._kind(node)] -= self.sizes.pop(node)

    def moment(self, logits: int, is_forward: bool) -> Moment:
        """Now. What forward has as its results is kept for backward."""
        of, kept = self._bytes, "result" if is_forward else "given"
        gradients = 0 if is_forward else of["result", True] + of["result", False]
        passing = of["other", True] + of["other", False] + self._scratch
        fixed = of[kept, True], of["other", True]
        return Moment(fixed[0] + of[kept, False], gradients, passing, *fixed, logits)

    def _kind(self, node: fx.Node) -> tuple[str, bool]:
        kind = "given" if node in self._given else "result" if node in self._results else "other"
        return kind, node in self._fixed


def _flow(
    plan: "_Plan", stays: set[fx.Node], fixed: set[fx.Node], weights: Set[tuple[int, ...]], is_forward: bool = False
) -> Flow:
    given = set(plan.given) - stays
    results = plan.results - given - stays
    scratch = max((kernel.scratch for kernel in plan.kernels), default=0)
    held, moments = _Held(given, results, fixed, scratch), []
    for kernel in plan.kernels:
        over = [part for part in kernel.last if part in held.sizes and part not in results]
        if not kernel.alone:  # what a fused kernel reads for the last time, it may write over
            for size in map(_size, kernel.parts):
                reused = next((part for part in over if held.sizes[part] == size), None)
                if reused is not None:
                    over.remove(reused)
                    held.drop(reused)
        for part in kernel.parts:
            held.add(part)
        moments.append(held.moment(kernel.logits, is_forward))
        for part in [*over, *(part for part in kernel.unread if part not in results)]:
            held.drop(part)
    end = sum(held.sizes.get(part, 0) for part in results)
    return Flow(tuple(fullest(moments)), end, tuple(plan.costs(weights)))


@dataclass
class _Kernel:
    """What is launched at once, as far as memory goes: one operator, with the arithmetic that feeds it.

    Attributes:
        parts: what it writes; `last`: what it is the last to read; `unread`: what it writes and nobody reads.
        alone: nothing else is fused with it.
        logits, scratch: bytes that our cross entropy, and attention's backward, take while they run.
    """

    node: fx.Node
    reads: frozenset[fx.Node]
    alone: bool
    logits: int
    scratch: int
    parts: list[fx.Node]
    last: list[fx.Node]
    unread: list[fx.Node]


class _Plan:
    """Which nodes of a graph write memory, and what they read for it.

    Args:
        kept: what placeholders of these names are views of, in another graph; None: of what is there all the time.

    Attributes:
        given: what the graph gets and frees: of several views of one thing, the thing.
        named: the memory that each of its results is in.
    """

    def __init__(self, graph: fx.GraphModule, kept: Mapping[str, fx.Node | None], is_backward: bool) -> None:
        self.nodes: list[fx.Node] = list(graph.graph.nodes)
        self.kernels: list[_Kernel] = []
        self.given: list[fx.Node] = []
        self.named: dict[str, fx.Node] = {}
        self._reads: dict[fx.Node, frozenset[fx.Node]] = {}
        wanted = self._wanted()
        of: dict[fx.Node, _Kernel] = {}
        for node in self.nodes:
            if node.op == "placeholder":
                self._give(node, kept)
            elif node.op == "output":
                self._end(node)
            elif _is_item(node) and node.args[0] in of:
                of[node.args[0]].parts.append(node)  # type: ignore[index]
                self._reads[node] = frozenset([node])
            elif _is_view(node) or self._is_fused(node, wanted):
                self._reads[node] = self._read_by(node)
            elif _tensors(node):
                self._reads[node] = frozenset([node])
                of[node] = self._kernel(node)
                self.kernels.append(of[node])
        if is_backward:
            self._put_gradients_last()
        self._find_ends()

    def _give(self, node: fx.Node, kept: Mapping[str, fx.Node | None]) -> None:
        source = kept.get(node.name, node)
        self._reads[node] = frozenset() if source is None or not _tensors(node) else frozenset([source])
        self.given += [part for part in self._reads[node] if part not in self.given]

    def _end(self, node: fx.Node) -> None:
        for result in node.all_input_nodes:
            if len(self._reads.get(result, ())) == 1:
                self.named[result.name] = next(iter(self._reads[result]))
        self.results = set(self._read_by(node))

    def _kernel(self, node: fx.Node) -> "_Kernel":
        parts = [node] if isinstance(node.meta["val"], Tensor) else []
        arguments = _values(node.args)
        taken = logits_of(node.target, arguments), scratch_of(node.target, arguments)
        return _Kernel(node, self._read_by(node), _is_alone(node), *taken, parts, [], [])

    def costs(self, weights: Set[tuple[int, ...]]) -> list[Cost]:
        """Kernels that stand alone each; others by what is fused: between two such, up to a sum that must be known.

        Args:
            weights: the sides of all weights.
        """
        found: list[Cost] = []
        groups: dict[tuple[int, int], list[_Kernel]] = {}
        level: dict[fx.Node, tuple[int, int]] = {}
        run = 0
        for kernel in self.kernels:
            if kernel.alone:
                run += 1
                found.append(_cost(kernel.node, weights))
                continue
            place = max((level[part][1] for part in kernel.reads if level.get(part, (-1, 0))[0] == run), default=0)
            groups.setdefault((run, place), []).append(kernel)
            after = place + _sums_long_rows(kernel.node)
            level.update((part, (run, after)) for part in kernel.parts)
        for group in groups.values():
            written = {part for kernel in group for part in kernel.parts}
            read = {part for kernel in group for part in kernel.reads} - written
            fixed = sum(_size(part) for part in (*read, *written) if _is_like_one(part, weights))
            found.append(Cost("memory", COMPILED, 0.0, float(sum(map(_size, (*read, *written)))), 1, float(fixed)))
        return found

    def _read_by(self, node: fx.Node) -> frozenset[fx.Node]:
        return frozenset().union(*(self._reads.get(source, frozenset()) for source in node.all_input_nodes))

    def _wanted(self) -> set[fx.Node]:
        """What has to be in memory, as something that is not fused reads it, or the caller."""
        wanted: set[fx.Node] = set()
        for node in reversed(self.nodes):
            for user in node.users:
                if user.op == "output" or _is_alone(user) or ((_is_view(user) or _is_item(user)) and user in wanted):
                    wanted.add(node)
        return wanted

    def _is_fused(self, node: fx.Node, wanted: set[fx.Node]) -> bool:
        if node in wanted or _is_alone(node) or _is_sum(node):
            return False
        return len(node.users) <= 1 or len(self._read_by(node)) <= _MOST_READS

    def _put_gradients_last(self) -> None:
        """Of a block that is recomputed, what no other block reads is computed behind all else, as the compiler's
        scheduler has it: weights' gradients, and what they are made of stays so long.
        """
        blocks: list[list[_Kernel]] = [[]]
        block = None
        for kernel in self.kernels:
            of = kernel.node.meta.get("ac_graph_id", block)
            if of != block:
                blocks.append([])
                block = of
            blocks[-1].append(kernel)
        read = frozenset().union(*(kernel.reads for kernel in blocks[-1]))
        for kernels in blocks[-2:0:-1]:
            soon: list[_Kernel] = []
            last: list[_Kernel] = []
            needed = set(read)
            for kernel in reversed(kernels):
                is_needed = not needed.isdisjoint(kernel.parts)
                needed |= kernel.reads if is_needed else set()
                (soon if is_needed else last).append(kernel)
            kernels[:] = [*reversed(soon), *reversed(last)]
            read |= frozenset().union(*(kernel.reads for kernel in kernels))
        self.kernels = [kernel for kernels in blocks for kernel in kernels]

    def _find_ends(self) -> None:
        seen: set[fx.Node] = set()
        for kernel in reversed(self.kernels):
            kernel.unread = [part for part in kernel.parts if part not in seen]
            kernel.last = [part for part in kernel.reads if part not in seen]
            seen |= kernel.reads


def _tensors(node: fx.Node) -> list[Tensor]:
    return [value for value in tree_leaves(node.meta.get("val")) if isinstance(value, Tensor)]


def _size(node: fx.Node) -> int:
    return sum(-(-value.numel() * value.element_size() // 512) * 512 for value in _tensors(node))


def _values(arguments: Any) -> Any:
    return fx.map_arg(arguments, lambda node: node.meta.get("val"))


def _is_item(node: fx.Node) -> bool:
    return node.target is operator.getitem


def _is_view(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    schema = node.target._schema
    viewed = any(result.alias_info is not None and not result.alias_info.is_write for result in schema.returns)
    return viewed or schema.name == "aten::_unsafe_view"


def _is_sum(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.reduction in node.target.tags


def _is_alone(node: fx.Node) -> bool:
    if node.op != "call_function" or _is_view(node) or _is_item(node) or _is_sum(node):
        return False
    if not isinstance(node.target, torch._ops.OpOverload):
        return True
    return torch.Tag.pointwise not in node.target.tags and node.target._schema.name not in _FUSED


def _sums_long_rows(node: fx.Node) -> bool:
    read = sum(value.numel() for source in node.all_input_nodes for value in _tensors(source)[:1])
    written = sum(value.numel() for value in _tensors(node))
    return _is_sum(node) and read > _LONGEST_ROW * written


def _is_like_one(node: fx.Node, weights: Set[tuple[int, ...]]) -> bool:
    return all(sides(tensor) in weights for tensor in _tensors(node))


def _cost(node: fx.Node, weights: Set[tuple[int, ...]]) -> Cost:
    args, kwargs = _values(node.args), _values(node.kwargs)
    read = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
    cost = cost_of(node.target, args, kwargs, node.meta["val"], read, _tensors(node), weights)
    return cost or Cost("memory", COMPILED, 0.0, 0.0, 1)
