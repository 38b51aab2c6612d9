"""From what was measured to shares of a step's time, a verdict, and what ranks do to each other."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, quantiles, stdev

from hotloop.core.profile import KINDS, Ablation, RankProfile, StepSeconds
from hotloop.profile.measured import Block, Measured, StepTime
from hotloop.profile.timeline import Timeline

PROOFS = {
    "input": "cached_batch", "copy": "batch_on_device", "sync": "no_sync", "communication": "no_communication",
}  # fmt: skip
"""The ablation that leaves a kind out."""
_HOLDS_UP = 0.25
"""Share from which on what is not computing holds a training up, even if computing takes more."""
_TOLD = 0.01
"""Share of a step by which two means must be known to differ, to be compared."""
_SLOW = 0.1
"""Share of a step that others wait for a rank, from which on it is called slow."""


def regular_steps(block: Block) -> Sequence[StepTime]:
    """Steps like others; all of them if none is."""
    return [step for step in block.steps if step.regular] or block.steps


def regular_seconds(block: Block) -> Sequence[float]:
    """How long steps like others took: by the GPU's own events if there are any, as the host may be ahead of it."""
    if not block.device_seconds:
        return [step.seconds for step in regular_steps(block)]
    device = [seconds for seconds, step in zip(block.device_seconds, block.steps, strict=True) if step.regular]
    return device or block.device_seconds


def mean_seconds(block: Block) -> float:
    """Of a step like others."""
    return fmean(regular_seconds(block))


def step_seconds(block: Block) -> StepSeconds:
    """How long steps took, with their spread."""
    seconds = sorted(regular_seconds(block))
    tenths = quantiles(seconds, n=10, method="inclusive") if len(seconds) > 1 else seconds * 9
    error = stdev(seconds) / len(seconds) ** 0.5 if len(seconds) > 1 else 0.0
    return StepSeconds(median=tenths[4], p10=tenths[0], p90=tenths[8], mean=fmean(seconds), error=error)


def shares(measured: Measured, line: Timeline | None) -> dict[str, float]:
    """Of a step's time, by kind; their sum is 1.

    Steps without a trace say how long they took, and on a CPU how much of it went into input and compilation; the trace
    says what the rest consists of. On a GPU the trace says how long the card was at work, which a profiler does not
    change, and what the host was at while it was not; what waits cost and how long launches keep it from work allow for
    the host's being slower there.
    """
    watched = measured.block("watched")
    assert watched
    steps, whole = regular_steps(watched), mean_seconds(watched)
    if line is None:
        found = dict.fromkeys(KINDS, 0.0)
        found["input"] = fmean(step.input for step in steps) / whole
        found["compute"] = 1 - found["input"]
        return found
    traced = {kind: line.seconds(kind) for kind in KINDS}
    if measured.device == "cuda":
        traced = _as_untraced(traced, line.added, fmean(step.input for step in steps))
        known = {kind: min(1.0, traced[kind] / whole) for kind in ("compute", "communication", "sync")}
    else:
        known = {"input": fmean(step.input for step in steps) / whole}
        traced["other"] += fmean(step.compiling for step in steps)
    return _filled(known, traced)


def _as_untraced(traced: Mapping[str, float], added: float, waited: float) -> dict[str, float]:
    """Seconds of a traced step without those that were added to it: tracing makes each call of torch's longer, and with
    it the gaps between launches. What input took longer than in other steps was added there, by a loader that was late.

    Args:
        waited: for input, in a step that was not traced.
    """
    late = max(0.0, traced["input"] - waited)
    launch = max(0.0, traced["launch"] - max(0.0, added - late))
    return {**traced, "input": traced["input"] - late, "launch": launch}


def _filled(known: Mapping[str, float], traced: Mapping[str, float]) -> dict[str, float]:
    """Shares that are known, and the rest of 1 in the proportions of the trace."""
    known = {kind: share / max(1.0, sum(known.values())) for kind, share in known.items()}
    rest = {kind: seconds for kind, seconds in traced.items() if kind not in known}
    total, left = sum(rest.values()), 1 - sum(known.values())
    filled = {kind: left * seconds / total if total else 0.0 for kind, seconds in rest.items()}
    found = {kind: {**known, **filled}[kind] for kind in KINDS}
    found["other"] += 1 - sum(found.values())
    return found


def saved(kind: str, left_out: Sequence[Ablation]) -> float | None:
    """By leaving a kind out; None if that was not done. What is done with batches given again counts from there."""
    gains = {one.name: one.gain for one in left_out}
    gain = gains.get(PROOFS.get(kind, ""))
    return gain if gain is None or kind == "input" else gain - max(0.0, gains.get("cached_batch", 0.0))


def verdict(found: Mapping[str, float], left_out: Sequence[Ablation]) -> str:
    """What holds the training up.

    Leaving a part out may save more than its share: workers that decode take processors from the training. What may be
    chance, as some of the steps were disturbed, proves nothing.
    """
    certain = {one.name for one in left_out if one.is_certain}
    proven = {kind: saved(kind, left_out) or 0.0 for kind, name in PROOFS.items() if name in certain}
    cost = {kind: max(share, proven.get(kind, 0.0)) for kind, share in found.items() if kind != "compute"}
    kind = max(cost, key=lambda kind: cost[kind])
    return kind if cost[kind] >= min(_HOLDS_UP, found["compute"]) else "compute"


def ablations(measured: Measured, computing: float) -> tuple[Ablation, ...]:
    """What leaving parts out saved.

    Several ranks are given their batches again whether or not a DataLoader gives them any. Where none does, those steps
    are the script's own, and the others are compared with them: a training's first steps may be slower than later ones.

    Args:
        computing: share of a step; without the host's time for our stand-ins a step takes that at least.
    """
    watched = measured.block("watched")
    assert watched
    whole, base = mean_seconds(watched), watched
    left_out = [block for block in measured.blocks if block.name not in ("watched", "bare") and block.steps]
    seconds = {block.name: mean_seconds(block) for block in left_out}
    if measured.loader is None and measured.world_size > 1:
        whole, base = seconds.pop(PROOFS["input"], whole), measured.block(PROOFS["input"]) or watched
        left_out = [block for block in left_out if block.name in seconds]
    for block in left_out:
        if block.own:
            seconds[block.name] = min(seconds[block.name], max(seconds[block.name] - block.own, computing * whole))
    errors = {block.name: math.hypot(step_seconds(base).error, step_seconds(block).error) / whole for block in left_out}
    if PROOFS["input"] in errors and measured.loader and measured.loader.workers and not measured.loader.is_busy:
        errors[PROOFS["input"]] += watched.late  # other programs took the processors, for as long as they liked
    return tuple(Ablation(name, each, 1 - each / whole, errors[name]) for name, each in seconds.items())


def overhead_ratio(measured: Measured) -> float:
    """By how much watching lengthened a step: watched against unwatched steps where these are regular enough to tell a
    hundredth; else by the time that our own code took.
    """
    watched, bare = measured.block("watched"), measured.block("bare")
    if not watched or not bare:
        return measured.hooks_ratio
    (with_us, error), (without, other) = _mean(watched), _mean(bare)
    told = math.hypot(error / with_us, other / without) <= _TOLD
    return with_us / without - 1 if told else measured.hooks_ratio


def _mean(block: Block) -> tuple[float, float]:
    """Mean of a step and its standard error."""
    seconds = block.device_seconds or [step.seconds for step in block.steps]
    return fmean(seconds), stdev(seconds) / math.sqrt(len(seconds))


def rank_profiles(measured: Sequence[Measured], lines: Sequence[Timeline | None]) -> tuple[RankProfile, ...]:
    """Each rank's shares; what a rank spends on communication beyond the least of all, it waits for others."""
    found = []
    for one, line in zip(measured, lines, strict=True):
        watched = one.block("watched")
        assert watched
        found.append(RankProfile(one.rank, step_seconds(watched), shares(one, line)))
    least = min(rank.shares["communication"] for rank in found)
    return tuple(replace(rank, waiting=rank.shares["communication"] - least) for rank in found)


def slow_rank(ranks: Sequence[RankProfile]) -> RankProfile | None:
    """The rank that others wait for, if they do."""
    if len(ranks) < 2:
        return None
    slowest = min(ranks, key=lambda rank: rank.waiting)
    return slowest if fmean(rank.waiting for rank in ranks if rank is not slowest) >= _SLOW else None
