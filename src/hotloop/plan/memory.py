"""The memory of one GPU, part by part, for a way to divide a training among several."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from hotloop.plan.cards import table
from hotloop.plan.footprint import Footprint, Moment, State
from hotloop.train.gathered import has_room
from hotloop.train.source import SLOTS

_GIB = 2**30


@dataclass(frozen=True)
class Division:
    """How ranks share the work.

    Attributes:
        ranks: GPUs that train together.
        weights: each gradient, weight and optimizer's state lies with one of them (FSDP).
        tensor: of them compute each layer together.
    """

    ranks: int = 1
    weights: bool = False
    tensor: int = 1

    @property
    def name(self) -> str:
        """As a job's `parallel` calls it."""
        if self.ranks == 1:
            return "none"
        if self.tensor > 1:
            return "fsdp+tp" if self.weights else "tp"
        return "fsdp" if self.weights else "ddp"

    @property
    def data(self) -> int:
        """How many of them have samples of their own."""
        return self.ranks // self.tensor

    @property
    def share(self) -> float:
        """Of weights, gradients and the optimizer's state that a rank has, layers taken whole."""
        return 1 / (self.data if self.weights else 1)

    def layers(self, state: State) -> float:
        """Of all weights, what belongs to a rank's layers: those of blocks are divided."""
        return 1 / self.tensor * state.blocks_share + (1 - state.blocks_share)


@dataclass(frozen=True)
class Memory:
    """Of one GPU, at the fullest moment of a step, in bytes.

    Attributes:
        parts: "weights", "gradients", "optimizer", "averaged", "activations", "temporary", "communication", "input",
            "workspace": what torch's allocator counts; "slack", what it cannot use; "context", what is outside of it.
    """

    parts: Mapping[str, float]

    @property
    def allocated(self) -> float:
        """As `torch.cuda.max_memory_allocated` tells."""
        return sum(self.parts.values()) - self.parts["slack"] - self.parts["context"]

    @property
    def peak(self) -> float:
        """That a card needs to have."""
        return sum(self.parts.values())


def least_bytes(state: State, division: Division) -> float:
    """What a rank needs for weights, gradients and the optimizer's state alone."""
    held = state.parameter_bytes + state.learnt_bytes + state.optimizer_bytes
    return held * division.share * division.layers(state)


def memory_of(
    footprint: Footprint, division: Division, averaged: bool, accumulates: bool, total_bytes: float,
    data: float = 0.0, halved: bool = True,
) -> Memory:  # fmt: skip
    """The memory of a rank: where there is room, blocks keep gathered weights from forward to backward.

    Args:
        footprint: of its step; of divided weights traced so (`Way.divided`).
        averaged: whether weights are averaged (`train.ema`).
        accumulates: whether several batches make a step, whose gradients stay.
        total_bytes: of the card.
        data: bytes of the data set, if its arrays are kept on the GPU; 0: batches are sent there.
        halved: whether divided weights are gathered in 16 bits.
    """
    part = 0.5 if halved else 1.0
    take = partial(_memory, footprint, division, averaged, accumulates, data, part)
    memory, more = take(keeps=False), _kept_bytes(footprint.state, division, part)
    return take(keeps=True) if more and has_room(memory.peak, more, total_bytes) else memory


def _kept_bytes(state: State, division: Division, part: float) -> float:
    """Of gathered weights that blocks would keep; two blocks' are there anyway."""
    if not division.weights:
        return 0.0
    more = max(0.0, state.blocks_share * state.parameter_bytes - 2 * state.block_bytes)
    return part * more / division.tensor


def _memory(
    footprint: Footprint, division: Division, averaged: bool, accumulates: bool, data: float, part: float, keeps: bool
) -> Memory:
    state = footprint.state
    share, layers = division.share, division.layers(state)
    weights, learnt = state.parameter_bytes * share * layers, state.learnt_bytes * share * layers
    done = [_gradients_share(moment, footprint) for moment in footprint.passes]
    moments = [_of_rank(*one, division, learnt) for one in zip(footprint.passes, done, strict=True)]
    if accumulates or division.name in ("ddp", "tp"):  # they lie side by side all the time
        moments = [Moment(moment.activations, learnt, moment.temporary) for moment in moments]
    moments.append(Moment(0.0, learnt, state.update.temporary * share * layers))
    sent = [_communication(state, division, part, 1 - one if keeps else 0.0) for one in [*done, 1.0]]
    fullest, communication = max(zip(moments, sent, strict=True), key=lambda one: one[0].bytes + one[1])
    tensors = {
        "weights": weights + state.buffer_bytes,
        "gradients": fullest.gradients,
        "optimizer": state.optimizer_bytes * share * layers,
        "averaged": weights + state.buffer_bytes if averaged else 0.0,
        "activations": fullest.activations,
        "temporary": fullest.temporary,
        "communication": communication,
        "input": footprint.batch_bytes + (data or SLOTS * footprint.batch_bytes),
        "workspace": _workspace(footprint),
    }
    allowances = table()["allowances"]
    context = allowances["context"] + (allowances["communication"] if division.ranks > 1 else 0.0)
    slack = allowances["slack"] * sum(tensors.values())
    return Memory({**tensors, "slack": slack, "context": context * _GIB})


def _gradients_share(moment: Moment, footprint: Footprint) -> float:
    """Of all gradients, those that are there."""
    return moment.gradients / (max(moment.gradients for moment in footprint.passes) or 1.0)


def _of_rank(moment: Moment, done: float, division: Division, learnt: float) -> Moment:
    """A moment of a rank whose samples were traced alone.

    Args:
        done: the share of gradients that are there. Traced, they stay whole and have the weights' format; a rank keeps
            its part of them, as the optimizer has it.
    """
    return Moment(moment.activations / division.tensor, learnt * done, moment.passing / division.tensor)


def _communication(state: State, division: Division, part: float, kept: float) -> float:
    """Of divided weights: two blocks and what is outside of blocks, as they are gathered; and a block's gradients in 32
    bits. Of whole ones: gradients once more, as ways to average them are tried (0.12 GiB for ResNet-50 and 0.6 for
    GPT-2 on two H200).

    Args:
        kept: of all weights, those that may lie gathered until their gradients are there. As these come, they go: 12
            layers of Llama 3 8B that are recomputed take 0.4 GiB more for keeping 4.1 (two H200s).
    """
    if division.name == "ddp":
        return state.learnt_bytes
    if not division.weights:
        return 0.0
    block = state.block_bytes / division.tensor
    gathered = max(2 * block, min(kept, state.blocks_share) * state.parameter_bytes / division.tensor)
    return part * (gathered + (1 - state.blocks_share) * state.parameter_bytes) + block


def _workspace(footprint: Footprint) -> float:
    allowances = table()["allowances"]
    convolutions = [cost for cost in footprint.pass_costs if cost.kind == "convolution"]
    if not convolutions:
        return float(allowances["matrix"] * _GIB)
    largest = max(convolutions, key=lambda cost: cost.bytes)
    share = allowances["convolution_32" if largest.format == "fp32" else "convolution_16"]
    return float(allowances["convolution"] * _GIB + share * largest.bytes)
