"""How long a step takes on a card: each kernel as long as its arithmetic or its traffic takes, whichever is more. Where
several ranks divide a model no step is captured: it takes at least what the host needs to launch it.

Source of the model: Williams, Waterman and Patterson, "Roofline: an insightful visual performance model" (2009).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hotloop.plan.cards import Card, table
from hotloop.plan.footprint import COMPILED, Cost, Footprint
from hotloop.plan.memory import Division


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step.

    Attributes:
        low, high: between which it is expected.
        exchange: of them, waiting for other GPUs.
        source: "roofline", or "measured".
    """

    seconds: float
    low: float
    high: float
    exchange: float
    source: str = "roofline"


def step_time(
    footprint: Footprint, card: Card, precision: str, division: Division, windows: int, compiled: bool,
    own_kernels: bool,
) -> StepTime:  # fmt: skip
    """The time of a step by its kernels.

    Args:
        footprint: of a rank's batch.
        precision: of products and convolutions, as the job calls it.
        windows: batches a step (`train.accumulate`).
        own_kernels: hotloop's around convolutions, where the model is compiled.
    """
    reached = table()["reached"]
    passes = _seconds(footprint.pass_costs, card, precision, compiled, own_kernels) / division.tensor
    within = layers_bytes(footprint, division) / card.link_rate  # nothing computes meanwhile
    update = _seconds(footprint.state.update_costs, card, precision, compiled, False) * division.share / division.tensor
    exchange = exchanged_bytes(footprint, division) / card.link_rate
    hidden = min(exchange, 0.9 * passes) if division.weights else 0.0  # gathered while the block before computes
    exchanges = windows if division.weights else 1
    waits = windows * within + exchanges * (exchange - hidden)
    total = max(windows * passes + update + waits, windows * _host_seconds(footprint, division, compiled))
    off = reached["uncertainty"]
    return StepTime(total, (1 - off) * total, (1 + off) * total + windows * hidden, waits)


def exchanged_bytes(footprint: Footprint, division: Division) -> float:
    """What a rank sends in a pass, as an all-reduce counts it: (N - 1) / N of it goes out and comes in twice."""
    part = 2 * (division.data - 1) / division.data
    if division.weights:  # weights twice in 16 bits, gradients once in 32: as much as one all-reduce of 32 bits
        return part * footprint.state.parameter_bytes / division.tensor
    return part * footprint.state.learnt_bytes / division.tensor


def layers_bytes(footprint: Footprint, division: Division) -> float:
    """What a rank sends in a pass within layers that several compute, counted likewise: each block's two layers are
    given what is gathered, and what they give is summed up and divided; backward does the same.
    """
    part = 2 * (division.tensor - 1) / division.tensor
    return part * 4 * footprint.state.blocks * footprint.stream_bytes


def _host_seconds(footprint: Footprint, division: Division, compiled: bool) -> float:
    """What the host needs to launch a pass that is not captured."""
    host = table()["reached"]["host"]
    each = host["weights"] if division.weights else 0.0
    if division.tensor > 1:
        each += host["layers" if compiled else "layers_eager"]
    return float(each * footprint.state.blocks)


def _seconds(costs: Sequence[Cost], card: Card, precision: str, compiled: bool, own_kernels: bool) -> float:
    reached = table()["reached"]
    own_kernels = own_kernels and compiled and any(cost.kind == "convolution" for cost in costs)
    total = 0.0
    for cost in costs:
        numbers = _numbers(cost, precision)
        of = reached["32" if numbers in ("fp32", "tf32") else "16"]
        if cost.kind == "memory":
            share = of["memory" if compiled else "memory_eager"] / (of["own_kernels"] if own_kernels else 1.0)
            computing = 0.0
        else:  # libraries' kernels, whoever calls them
            share, computing = of["memory"], cost.flops / (of[cost.kind] * card.rates[numbers])
        moving = cost.bytes / (share * card.memory_rate)
        total += cost.count * (max(computing, moving) + reached["launch_seconds"])
    return total


def _numbers(cost: Cost, precision: str) -> str:
    """Whose rate holds for a kernel. The compiler's own kernels have the precision's."""
    if precision == "float8" and cost.kind == "matrix":
        return "float8"
    if cost.format in ("bf16", "fp16"):
        return cost.format
    if cost.format == COMPILED and precision in ("bf16", "fp16", "float8"):
        return "bf16"
    return "fp32" if precision == "fp32" or cost.kind == "attention" else "tf32"
