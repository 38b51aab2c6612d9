"""The memory of one GPU, part by part, for a way to divide a training among several."""

from collections.abc import Mapping
from dataclasses import dataclass

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


def memory_on(memory: Memory, state: State, division: Division, total_bytes: float, halved: bool = True) -> Memory:
    """The same on a card of that size: where there is room, blocks keep gathered weights from forward to backward.

    Args:
        halved: whether weights are gathered in 16 bits.
    """
    if not division.weights:
        return memory
    blocks = state.blocks_share * state.parameter_bytes
    more = max(0.0, blocks - 2 * state.block_bytes) * division.layers(state)  # two are there anyway
    more *= 0.5 if halved else 1.0
    if not has_room(memory.peak, more, total_bytes):
        return memory
    return Memory({**memory.parts, "communication": memory.parts["communication"] + more})


def memory_of(
    footprint: Footprint, division: Division, averaged: bool, accumulates: bool, data: float = 0.0, halved: bool = True
) -> Memory:
    """The memory of a rank.

    Args:
        footprint: of its step; of divided weights traced so (`Way.divided`).
        averaged: whether weights are averaged (`train.ema`).
        accumulates: whether several batches make a step, whose gradients stay.
        data: bytes of the data set, if its arrays are kept on the GPU; 0: batches are sent there.
        halved: whether divided weights are gathered in 16 bits.
    """
    state = footprint.state
    share, layers = division.share, division.layers(state)
    weights, learnt = state.parameter_bytes * share * layers, state.learnt_bytes * share * layers
    moments = [_of_rank(moment, footprint, division, learnt) for moment in footprint.passes]
    if accumulates or division.name in ("ddp", "tp"):  # they lie side by side all the time
        moments = [Moment(moment.activations, learnt, moment.temporary) for moment in moments]
    moments.append(Moment(0.0, learnt, state.update.temporary * share * layers))
    fullest = max(moments, key=lambda moment: moment.bytes)
    tensors = {
        "weights": weights + state.buffer_bytes,
        "gradients": fullest.gradients,
        "optimizer": state.optimizer_bytes * share * layers,
        "averaged": weights + state.buffer_bytes if averaged else 0.0,
        "activations": fullest.activations,
        "temporary": fullest.temporary,
        "communication": _communication(state, division, layers, 0.5 if halved else 1.0),
        "input": footprint.batch_bytes + (data or SLOTS * footprint.batch_bytes),
        "workspace": _workspace(footprint),
    }
    allowances = table()["allowances"]
    context = allowances["context"] + (allowances["communication"] if division.ranks > 1 else 0.0)
    slack = allowances["slack"] * sum(tensors.values())
    return Memory({**tensors, "slack": slack, "context": context * _GIB})


def _of_rank(moment: Moment, footprint: Footprint, division: Division, learnt: float) -> Moment:
    """A moment of a rank whose samples were traced alone."""
    activations, temporary = (value / division.tensor for value in (moment.activations, moment.passing))
    # Traced, gradients stay whole and have the weights' format; a rank keeps its part of them, as the optimizer has it.
    whole = max(moment.gradients for moment in footprint.passes) or 1.0
    return Moment(activations, learnt * moment.gradients / whole, temporary)


def _communication(state: State, division: Division, layers: float, part: float) -> float:
    """Of divided weights: two blocks and what is outside of blocks, as they are gathered; and a block's gradients in 32
    bits. Of whole ones: gradients once more, as ways to average them are tried (0.12 GiB for ResNet-50 and 0.6 for
    GPT-2 on two H200).
    """
    if division.name == "ddp":
        return state.learnt_bytes
    if not division.weights:
        return 0.0
    block = state.block_bytes * layers
    return part * (2 * block + (1 - state.blocks_share) * state.parameter_bytes) + block


def _workspace(footprint: Footprint) -> float:
    allowances = table()["allowances"]
    convolutions = [cost for cost in footprint.pass_costs if cost.kind == "convolution"]
    if not convolutions:
        return float(allowances["matrix"] * _GIB)
    largest = max(convolutions, key=lambda cost: cost.bytes)
    share = allowances["convolution_32" if largest.format == "fp32" else "convolution_16"]
    return float(allowances["convolution"] * _GIB + share * largest.bytes)
