"""A job's step, traced: its memory and its work for a batch, without a GPU, without weights, in seconds."""

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from hotloop.core.job import Job
from hotloop.data.dataset import Dataset, sample_fields
from hotloop.plan.allocations import Allocations
from hotloop.plan.footprint import Cost, Flow, Footprint, Moment, State, fullest, summed
from hotloop.plan.graphs import Joint, flows_of, joint_of, recomputed
from hotloop.plan.on_gpu import FORMATS, as_on_gpu, cast, fake_weights, faked
from hotloop.plan.state import state_of
from hotloop.tasks.task import RANDOM, Task, Tensors
from hotloop.train.blocks import (
    EXPENSIVE,
    are_alike,
    recomputable_blocks,
    recompute_activations,
    repeated_blocks,
    skip,
    wrap_forward,
)
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
            and are gathered (FSDP).
    """

    batch: int
    precision: str
    activations: str = "keep"
    compiled: bool = False
    divided: bool = False


class Tracer:
    """Traces a job's step in one way after another. Each takes 1 to 3 s on two cores, one of many blocks no longer."""

    _device = "meta"

    def __init__(self, job: Job, task: Task, dataset: Dataset) -> None:
        speed = job.speed.model_copy(update={"channels_last": False})
        self._job = job.model_copy(update={"device": "cpu", "speed": speed})
        self._task = copy.copy(task)
        self._task.job = self._job
        self._dataset = dataset
        self._fields = sample_fields(dataset, job.seed)
        self._captured: dict[Way, _Captured] = {}

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
        found = self._compiled(way) if way.compiled else self._run(way)
        moments, costs = found.whole()
        with self._tensors():
            batch_bytes = sum(tensor.numel() * tensor.element_size() for tensor in self._inputs(way.batch).values())
        return Footprint(self.state, way.batch, float(batch_bytes), found.stream_bytes, moments, costs)

    def _run(self, way: Way) -> "_Steps":
        """As it stands, operator by operator."""
        model = self._model(way.activations)
        with self._tensors(), as_on_gpu():
            whole, inputs = self._whole(model, way), self._inputs(way.batch)
            flows = [_flows(whole, inputs) for _ in _shortened(model)]
        return _Steps(flows, len(repeated_blocks(model)), whole.stream_bytes)

    def _compiled(self, way: Way) -> "_Steps":
        """The graph is the same whatever is kept of it: it is captured once."""
        kind = replace(way, activations="keep")
        if kind not in self._captured:
            self._captured[kind] = self._capture(kind)
        captured = self._captured[kind]
        if way.activations != "keep":
            recomputable_blocks(captured.model, way.activations)
        kept = {"keep": None, "selective": EXPENSIVE, "blocks": ()}[way.activations]
        flows = [flows_of(*joint.cut(kept), weights) for joint, weights in captured.joints]
        return _Steps(flows, len(repeated_blocks(captured.model)), captured.stream_bytes)

    def _capture(self, way: Way) -> "_Captured":
        model = self._model("keep")
        _mark(repeated_blocks(model))
        with self._tensors(), as_on_gpu():
            whole, inputs = self._whole(model, way), self._inputs(way.batch)
            joints = [_joint(whole, inputs, without) for without in _shortened(model)]
            return _Captured(model, joints, whole.stream_bytes)

    def _whole(self, model: nn.Module, way: Way) -> "_Whole":
        self._put_weights(model, FORMATS.get(way.precision) if way.divided else None)
        return _Whole(model, self._task, way)

    def _model(self, activations: str) -> nn.Module:
        with drawn_from(self._job.seed), torch.device(self._device):
            model = self._task.model()
            if activations != "keep":
                for block in repeated_blocks(model):
                    wrap_forward(block, _on_gpu_again)
                recompute_activations(model, activations)
        return model

    def _tensors(self) -> AbstractContextManager[None]:
        """Within, tensors are made."""
        return faked()

    def _put_weights(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        """Give the model weights that can be computed with, in this format; None: in their own."""
        fake_weights(model, dtype)

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


def _mark(blocks: Sequence[nn.Module]) -> None:
    """In place of torch.utils.checkpoint, which the capture would look through."""

    def marked(number: int, block: nn.Module) -> Callable[..., Any]:
        plain = block.forward

        def forward(*arguments: Any, **named: Any) -> Any:
            with recomputed(number):
                return plain(*arguments, **named)

        return forward

    for number, block in enumerate(blocks):
        block.forward = marked(number, block)


@dataclass(frozen=True)
class _Captured:
    """A compiled step's graphs, each with how many of its arguments are weights and buffers: see `_shortened`."""

    model: nn.Module
    joints: list[tuple[Joint, int]]
    stream_bytes: float


class _Whole(nn.Module):
    """From a batch as it arrives to its loss.

    Attributes:
        stream_bytes: of what the first of the repeated blocks was given, once it was.
    """

    def __init__(self, model: nn.Module, task: Task, way: Way) -> None:
        super().__init__()
        self.model = model
        self.stream_bytes = 0.0
        self._task = task
        self._precision = way.precision
        for block in repeated_blocks(model)[:1]:
            block.register_forward_pre_hook(self._weigh, with_kwargs=True)

    def forward(self, batch: Tensors) -> Tensor:
        task = self._task
        ready = task.prepare(batch, training=True)
        ready = {name: part.float() if part.is_floating_point() else part for name, part in ready.items()}
        with cast(self._precision):
            return task.loss(task.forward(self.model, ready), ready)

    def _weigh(self, block: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        streams = [one for one in (*given, *named.values()) if isinstance(one, Tensor) and one.is_floating_point()]
        self.stream_bytes = float(streams[0].nbytes) if streams else 0.0


def _flows(whole: _Whole, inputs: Tensors) -> tuple[Flow, Flow]:
    allocations = Allocations([*whole.parameters(), *whole.buffers()])

    def is_gradient(parameter: Tensor) -> None:
        assert parameter.grad is not None
        allocations.count_as(parameter.grad, "gradients")

    hooks = [
        parameter.register_post_accumulate_grad_hook(is_gradient)  # type: ignore[no-untyped-call]
        for parameter in whole.parameters()
        if parameter.requires_grad
    ]
    with allocations:
        allocations.phase = "activations"
        with allocations.watched() as forward:
            loss = whole(inputs)
        kept, computed = forward[-1].activations, len(allocations.costs)  # with casts that autocast keeps until its end
        allocations.phase = "temporary"
        with allocations.watched() as backward:
            loss.float().backward()
        learnt = allocations.bytes_of("gradients")
    for hook in hooks:
        hook.remove()
    for parameter in whole.parameters():
        parameter.grad = None
    return (
        Flow(tuple(fullest(forward)), kept, tuple(allocations.costs[:computed])),
        Flow(tuple(fullest(backward)), float(learnt), tuple(allocations.costs[computed:])),
    )


def _joint(whole: _Whole, inputs: Tensors, without: Sequence[nn.Module]) -> tuple[Joint, int]:
    named = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
    absent = {id(tensor) for block in without for tensor in (*block.parameters(), *block.buffers())}
    state = {name: tensor for name, tensor in named.items() if id(tensor) not in absent}
    names = list(inputs)

    def loss(weights: list[Tensor], batch: list[Tensor]) -> Tensor:
        value: Tensor = torch.func.functional_call(
            whole, dict(zip(state, weights, strict=True)), dict(zip(names, batch, strict=True))
        )
        return value.float()

    return joint_of(loss, list(state.values()), list(inputs.values())), len(state)


_TRACED = 2
"""Of blocks that are alike; the others are taken to be like those."""


def _shortened(model: nn.Module) -> Iterator[Sequence[nn.Module]]:
    """Blocks that are left out of a model by turns: none; or of many alike ones all but a few, and then one more."""
    blocks = repeated_blocks(model)
    if not are_alike(blocks):
        yield []
        return
    for count in (_TRACED + 1, _TRACED):
        skip(blocks[count:])
        yield blocks[count:]


@dataclass(frozen=True)
class _Steps:
    """Forward and backward of a model, or of it with few of many blocks: see `_shortened`."""

    flows: list[tuple[Flow, Flow]]
    blocks: int
    stream_bytes: float

    def whole(self) -> tuple[tuple[Moment, ...], tuple[Cost, ...]]:
        """The fullest moments, and what is computed, with all blocks."""
        if len(self.flows) > 1:
            return _extrapolated(self.flows[1], self.flows[0], self.blocks - _TRACED)
        forward, backward = self.flows[0]
        return (*forward.moments, *backward.moments), summed((*forward.costs, *backward.costs))


def _extrapolated(
    few: Sequence[Flow], more: Sequence[Flow], further: int
) -> tuple[tuple[Moment, ...], tuple[Cost, ...]]:
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
    return tuple(dict.fromkeys(moments)), tuple(costs)


def _counted(flows: Sequence[Flow]) -> list[tuple[Cost, int]]:
    return [(replace(cost, count=1), cost.count) for cost in summed(cost for flow in flows for cost in flow.costs)]
