"""A job's step, traced: its memory and its work for a batch, without a GPU, without weights, in seconds."""

import copy
from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from hotloop.core.job import Job
from hotloop.data.dataset import Dataset, sample_fields
from hotloop.plan.allocations import Allocations
from hotloop.plan.footprint import Cost, Footprint, Moment, State, summed
from hotloop.plan.graphs import Flow, flows_of, graphs_of, recomputed
from hotloop.plan.on_gpu import FORMATS, as_on_gpu, cast, fake_weights, faked
from hotloop.plan.state import state_of
from hotloop.tasks.task import RANDOM, Task, Tensors
from hotloop.train.blocks import EXPENSIVE, are_alike, recompute_activations, repeated_blocks, skip, wrap_forward
from hotloop.train.random_state import drawn_from


@dataclass(frozen=True)
class Way:
    """A way to train: what changes memory and work.

    Attributes:
        batch: samples of one process's forward and backward.
        precision: "fp32", "tf32", "bf16", "fp16" or "float8".
        activations: "keep", "selective" or "blocks".
        compiled: by torch.compile.
        divided: weights are there as what they compute in, and no copies of them are kept: they lie with several ranks
            and are gathered (FSDP), or they are cast again with the blocks that are recomputed.
    """

    batch: int
    precision: str
    activations: str = "keep"
    compiled: bool = False
    divided: bool = False


class Tracer:
    """Traces a job's step in one way after another. Each takes 1 to 5 s on two cores, one of many blocks no longer."""

    def __init__(self, job: Job, task: Task, dataset: Dataset) -> None:
        speed = job.speed.model_copy(update={"channels_last": False})
        self._job = job.model_copy(update={"device": "cpu", "speed": speed})
        self._task = copy.copy(task)
        self._task.job = self._job
        self._fields = sample_fields(dataset, job.seed)

    @cached_property
    def state(self) -> State:
        """Of all ways."""
        model = self._model("keep")
        with faked(), Allocations() as allocations:
            return state_of(fake_weights(model), self._job.optimizer, allocations)

    def trace(self, way: Way) -> Footprint:
        """A step.

        Raises:
            InputError: activations cannot be recomputed.
            Exception: whatever the model raises that needs real numbers, or knows no fakes.
        """
        model = self._model(way.activations)
        if way.compiled and way.activations != "keep":
            _mark_recomputed(repeated_blocks(model))
        with faked(), as_on_gpu():
            fake_weights(model, FORMATS.get(way.precision) if way.divided else None)
            whole, inputs = _Whole(model, self._task, way), self._inputs(way.batch)
            passes = _compiled_passes(whole, inputs, way) if way.compiled else _eager_passes(whole, inputs)
            batch_bytes = sum(tensor.numel() * tensor.element_size() for tensor in inputs.values())
        return Footprint(self.state, way.batch, float(batch_bytes), passes.moments, summed(passes.costs))

    def _model(self, activations: str) -> nn.Module:
        with drawn_from(self._job.seed), torch.device("meta"):
            model = self._task.model()
            if activations != "keep":
                for block in repeated_blocks(model):
                    wrap_forward(block, _on_gpu_again)
                recompute_activations(model, activations)
        return model

    def _inputs(self, batch: int) -> dict[str, Tensor]:
        inputs = {
            name: torch.empty((batch, *field.shape), dtype=getattr(torch, field.dtype.name))
            for name, field in self._fields.items()
        }
        if self._task.random_numbers:
            inputs[RANDOM] = torch.empty(batch, self._task.random_numbers)
        return inputs


def _on_gpu_again(forward: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Within backward torch has left the mode that forward was in."""
    with as_on_gpu():
        return forward(*arguments, **named)


def _mark_recomputed(blocks: Sequence[nn.Module]) -> None:
    """The compiler's way in place of torch.utils.checkpoint, which the capture would look through."""

    def marked(number: int, block: nn.Module) -> Callable[..., Any]:
        below: Any = type(block).__mro__[1]
        plain = below.forward  # below what recompute_activations has put over it

        def forward(*arguments: Any, **named: Any) -> Any:
            with recomputed(number):
                return plain(block, *arguments, **named)

        return forward

    for number, block in enumerate(blocks):
        block.forward = marked(number, block)


@dataclass(frozen=True)
class _Passes:
    """Forward and backward."""

    moments: tuple[Moment, ...]
    costs: tuple[Cost, ...]


class _Whole(nn.Module):
    """From a batch as it arrives to its loss."""

    def __init__(self, model: nn.Module, task: Task, way: Way) -> None:
        super().__init__()
        self.model = model
        self._task = task
        self._precision = way.precision

    def forward(self, batch: Tensors) -> Tensor:
        task = self._task
        ready = task.prepare(batch, training=True)
        ready = {name: part.float() if part.is_floating_point() else part for name, part in ready.items()}
        with cast(self._precision):
            return task.loss(task.forward(self.model, ready), ready)


def _eager_passes(whole: _Whole, inputs: Tensors) -> _Passes:
    allocations = Allocations([*whole.parameters(), *whole.buffers()])

    def is_gradient(parameter: Tensor) -> None:
        assert parameter.grad is not None
        allocations.count_as(parameter.grad, "gradients")

    for parameter in whole.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(is_gradient)  # type: ignore[no-untyped-call]
    with allocations, allocations.watched() as moments:
        allocations.phase = "activations"
        loss = whole(inputs)
        allocations.phase = "temporary"
        loss.float().backward()
    return _Passes(tuple(moments), tuple(allocations.costs))


_TRACED = 2
"""Of blocks that are alike; the others are taken to be like those."""


def _compiled_passes(whole: _Whole, inputs: Tensors, way: Way) -> _Passes:
    blocks = repeated_blocks(whole.model)
    if not are_alike(blocks):
        forward, backward = _flows(whole, inputs, way)
        return _Passes((*forward.moments, *backward.moments), (*forward.costs, *backward.costs))
    traced = []
    for count in (_TRACED + 1, _TRACED):
        skip(blocks[count:])
        without = {id(tensor) for block in blocks[count:] for tensor in (*block.parameters(), *block.buffers())}
        traced.append(_flows(whole, inputs, way, without))
    return _extrapolated(traced[1], traced[0], len(blocks) - _TRACED)


def _flows(whole: _Whole, inputs: Tensors, way: Way, without: Set[int] = frozenset()) -> tuple[Flow, Flow]:
    named = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
    state = {name: tensor for name, tensor in named.items() if id(tensor) not in without}
    names = list(inputs)

    def loss(weights: list[Tensor], batch: list[Tensor]) -> Tensor:
        value: Tensor = torch.func.functional_call(
            whole, dict(zip(state, weights, strict=True)), dict(zip(names, batch, strict=True))
        )
        return value.float()

    kept = EXPENSIVE if way.activations == "selective" else ()
    return flows_of(*graphs_of(loss, list(state.values()), list(inputs.values()), kept), len(state))


def _extrapolated(few: Sequence[Flow], more: Sequence[Flow], further: int) -> _Passes:
    """From the flows with a few blocks, and with one more, to those with so many further ones."""

    def at(first: Moment, second: Moment) -> Moment:
        def of(a: float, b: float) -> float:
            return max(0.0, a + further * (b - a))

        return Moment(
            of(first.activations, second.activations),
            of(first.gradients, second.gradients),
            second.temporary,
            of(first.fixed_activations, second.fixed_activations),
            second.fixed_temporary,
            second.logits,
        )

    # What a block keeps, and its gradients: a pair that differs by more is not of the same moment of the step.
    kept, learnt = (more[number].end - few[number].end for number in (0, 1))
    moments = []
    for before, after in zip(few, more, strict=True):
        for first, second in zip(before.moments, after.moments, strict=True):
            grown = second.activations - first.activations, second.gradients - first.gradients
            if 0 <= grown[0] <= 1.01 * kept and 0 <= grown[1] <= 1.01 * learnt:
                moments.append(at(first, second))
    counts = [Counter(dict(_counted(flows))) for flows in (few, more)]
    costs = []
    for cost in counts[0] | counts[1]:
        count = counts[0][cost] + further * (counts[1][cost] - counts[0][cost])
        if count > 0:
            costs.append(replace(cost, count=count))
    return _Passes(tuple(dict.fromkeys(moments)), tuple(costs))


def _counted(flows: Sequence[Flow]) -> list[tuple[Cost, int]]:
    return [(replace(cost, count=1), cost.count) for cost in summed(cost for flow in flows for cost in flow.costs)]
