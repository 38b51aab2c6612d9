"""What one process of a training does in a step with one batch, in bytes and operations: plain data, for any card."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from hotloop.tasks.cross_entropy import CHUNK_BYTES

COMPILED = ""
"""The format of what the compiler makes one kernel of."""


@dataclass(frozen=True)
class Cost:
    """Kernels of a kind: what each computes and moves.

    Attributes:
        kind: "matrix", "convolution", "attention", or "memory" for all that only moves numbers.
        format: of its inputs: "fp32", "bf16", "fp16", or another, by torch's name; `COMPILED`, of several.
        flops: of one.
        bytes: read and written by one, each tensor once.
        count: how many.
        fixed: of the bytes, as many with any batch: weights', and their gradients'.
    """

    kind: str
    format: str
    flops: float
    bytes: float
    count: int
    fixed: float = 0.0

    def scaled(self, times: float) -> "Cost":
        """The same with a batch so many times as large."""
        moved = self.fixed + times * (self.bytes - self.fixed)
        return replace(self, flops=times * self.flops, bytes=moved)


@dataclass(frozen=True)
class Moment:
    """Bytes that are taken at a moment of the step, besides weights, optimizer's state, buffers and the batch.

    Attributes:
        activations: kept for backward.
        gradients: of weights.
        temporary: results on their way.
        fixed_activations, fixed_temporary: of them, what is as large with any batch: casts of weights, say.
        logits: of our cross entropy, which holds a piece of them at most.
    """

    activations: float
    gradients: float
    temporary: float
    fixed_activations: float = 0.0
    fixed_temporary: float = 0.0
    logits: float = 0.0

    @property
    def passing(self) -> float:
        """All that is temporary."""
        return self.temporary + min(self.logits, CHUNK_BYTES)

    @property
    def bytes(self) -> float:
        return self.activations + self.gradients + self.passing

    def scaled(self, times: float) -> "Moment":
        """The same with a batch so many times as large."""
        activations = self.fixed_activations + times * (self.activations - self.fixed_activations)
        temporary = self.fixed_temporary + times * (self.temporary - self.fixed_temporary)
        fixed = self.fixed_activations, self.fixed_temporary
        return Moment(activations, self.gradients, temporary, *fixed, times * self.logits)


_BATCHES = (0.125, 1.0, 8.0, 64.0)
"""Times the batch, for which moments are looked for that would be the fullest."""


def fullest(moments: Sequence[Moment]) -> Iterator[Moment]:
    """With these batches and others, with these blocks and many more: by what grows with both."""
    for times in _BATCHES:
        pairs = [(at.scaled(times), at) for at in moments]
        yield max(pairs, key=lambda pair: pair[0].bytes)[1]
        yield max(pairs, key=lambda pair: pair[0].bytes - pair[0].gradients)[1]
        yield max(pairs, key=lambda pair: pair[0].bytes - pair[0].activations)[1]


@dataclass(frozen=True)
class Flow:
    """Forward's or backward's memory while it runs, beside what stays: weights, buffers and the batch; and its kernels.

    Attributes:
        moments: the fullest ones.
        end: bytes that are left: what forward keeps, or backward's gradients.
    """

    moments: tuple[Moment, ...]
    end: float
    costs: tuple[Cost, ...]


@dataclass(frozen=True)
class State:
    """What is there all the time, whatever the batch is, and the update that uses it.

    Attributes:
        parameters: numbers that are learnt or kept fixed.
        saved_buffer_bytes: of the buffers that a checkpoint holds, too.
        learnt_bytes: of the weights that have gradients.
        block_bytes: of the largest part whose weights FSDP gathers at once.
        blocks: repeated ones.
        blocks_share: of the weights' bytes, those of repeated blocks.
        update: the fullest moment of the optimizer's step; update_costs: of its kernels.
    """

    parameters: int
    parameter_bytes: float
    buffer_bytes: float
    saved_buffer_bytes: float
    optimizer_bytes: float
    learnt_bytes: float
    block_bytes: float
    blocks: int
    blocks_share: float
    update: Moment
    update_costs: tuple[Cost, ...]


@dataclass(frozen=True)
class Footprint:
    """A step of one process, with a batch of so many samples.

    Attributes:
        stream_bytes: of what goes from block to block; 0 without blocks.
        passes: the fullest moments of forward and backward.
        pass_costs: of their kernels.
    """

    state: State
    batch: int
    batch_bytes: float
    stream_bytes: float
    passes: tuple[Moment, ...]
    pass_costs: tuple[Cost, ...]

    @property
    def flops(self) -> float:
        return sum(cost.flops * cost.count for cost in self.pass_costs)


def summed(costs: Iterable[Cost]) -> tuple[Cost, ...]:
    """The same, alike ones together."""
    counts: Counter[Cost] = Counter()
    for cost in costs:
        counts[replace(cost, count=1)] += cost.count
    return tuple(replace(cost, count=count) for cost, count in counts.items())


def scaled(one: Footprint, batch: int) -> Footprint:
    """A step with another batch. What is computed is taken to grow with it, and what is moved, but for weights."""
    times = batch / one.batch
    return replace(
        one,
        batch=batch,
        batch_bytes=times * one.batch_bytes,
        stream_bytes=times * one.stream_bytes,
        passes=tuple(moment.scaled(times) for moment in one.passes),
        pass_costs=tuple(cost.scaled(times) for cost in one.pass_costs),
    )
