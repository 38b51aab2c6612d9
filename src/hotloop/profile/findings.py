"""What costs time in a script, each with what was measured of it. Nothing is said by rule of thumb alone."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import fmean

from hotloop.attach.malloc import KEEPING
from hotloop.core.profile import Ablation, Finding, RankProfile
from hotloop.core.units import count, format_bytes, format_seconds
from hotloop.profile.measured import Block, LoaderFacts, Measured
from hotloop.profile.shares import PROOFS, mean_seconds, regular_steps, saved, slow_rank

_WORTH_SAYING = 0.02
_MOST_WORKERS = 16
"""That are advised: each is a process, of some hundred megabytes."""
_MANY = 8
"""Waits a step from which on what else their line does, to make values of a tensor, counts as well."""
_ROOM = 0.5
"""Share of a GPU's memory up to which batches may be twice as large."""
_WAITED = 0.1
"""Share of a step from which on waiting for batches has a cause worth looking for."""


@dataclass(frozen=True)
class Evidence:
    """What findings are made from.

    Attributes:
        measured: of the rank that is told about.
        shares: its.
        ablations: its.
        ranks: all.
    """

    measured: Measured
    shares: Mapping[str, float]
    ablations: tuple[Ablation, ...]
    ranks: tuple[RankProfile, ...] = ()

    @property
    def watched(self) -> Block:
        block = self.measured.block("watched")
        assert block
        return block

    @property
    def processors(self) -> int:
        return int(self.measured.facts["processors"])

    @property
    def processors_a_rank(self) -> int:
        return max(1, self.processors // self.measured.local_world_size)

    @property
    def compiling(self) -> float:
        """Share of the steps."""
        steps = self.watched.steps
        return sum(step.compiling for step in steps) / sum(step.seconds for step in steps)

    def ablation(self, name: str) -> Ablation | None:
        """None if it was not done."""
        return next((one for one in self.ablations if one.name == name), None)

    def certain(self, name: str) -> Ablation | None:
        """An ablation that has saved more than chance may."""
        one = self.ablation(name)
        return one if one and one.is_certain else None

    def beyond_batches(self, name: str) -> Ablation | None:
        """The same of one with batches given again, as far as it has saved more than these alone."""
        one, alone = self.ablation(name), self.ablation(PROOFS["input"])
        if one and alone:
            one = replace(one, gain=one.gain - max(0.0, alone.gain), error=math.hypot(one.error, alone.error))
        return one if one and one.is_certain else None

    def gain(self, name: str) -> float | None:
        """Of an ablation; None if it was not done."""
        one = self.ablation(name)
        return one.gain if one else None


def findings(evidence: Evidence) -> tuple[Finding, ...]:
    """All that are worth saying, the largest gain first."""
    found = [
        *_input(evidence), *_epoch_start(evidence), *_copy(evidence), *_sync(evidence), *_launch(evidence),
        *_memory(evidence), *_page_faults(evidence), *_threads(evidence), *_recompiles(evidence), *_python(evidence),
        *_ranks(evidence), *_float32(evidence), *_data_parallel(evidence),
    ]  # fmt: skip
    return tuple(sorted((one for one in found if one.gain_at_most >= _WORTH_SAYING), key=lambda one: -one.gain_at_most))


def _input(evidence: Evidence) -> Iterator[Finding]:
    loader, share = evidence.measured.loader, evidence.shares["input"]
    measured = evidence.gain("cached_batch")
    gain = share if measured is None else max(0.0, measured)
    if loader is None or (share < _WAITED and not loader.is_busy):
        return  # workers that rest while nobody waits for them are as they should be
    waits = f"{share:.0%} of a step waits for the DataLoader"
    kind, title, why = _input_cause(loader, evidence.processors_a_rank)
    if kind == "slow_storage" and evidence.watched.late >= share:
        return  # the batches may have been there, and no processor to take them
    fix, gain = _input_fix(kind, evidence, loader, gain)
    outside = {"slow_transform": "image_folder" if loader.dataset == "ImageFolder" else ""}.get(kind, "loader")
    outside = outside if loader.can_be_replaced else ""
    yield Finding(f"input.{kind}", title, f"{waits}; {why}", gain, fix, loader.line, outside)


def _input_cause(loader: LoaderFacts, processors: int) -> tuple[str, str, str]:
    """Id, title and evidence."""
    busy = f"at work {min(1.0, loader.workers_busy):.0%} of the time"
    if not loader.workers:
        return "no_workers", "samples are loaded by the training process itself", f"num_workers=0, {busy}"
    workers = f"{loader.workers} worker{'s' if loader.workers > 1 else ''}, {busy}"
    if not loader.is_busy:
        return "slow_storage", "workers wait for something that is not a processor: disk, network, locks", workers
    if loader.workers < processors:
        return "few_workers", "workers compute all the time, and processors are left", workers
    return "slow_transform", "workers compute all the time on all processors", workers


def _input_fix(kind: str, evidence: Evidence, loader: LoaderFacts, gain: float) -> tuple[str, float]:
    """What to change, and what it gains at most.

    Args:
        gain: of steps whose batches are there, while nobody loads.
    """
    processors = evidence.processors_a_rank
    if kind == "slow_storage":
        return _waiting_at_once(evidence, loader, gain)
    if kind == "no_workers":
        return f"DataLoader(..., num_workers={processors}, persistent_workers=True)", gain
    if kind == "few_workers":
        return f"num_workers={processors}", gain
    samples = evidence.gain("cached_samples")  # batches would still have to be made and sent, by the same processors
    fix = "cheaper transforms, a faster decoder, or smaller files (hotloop data pack --side)"
    return fix, gain if samples is None else max(0.0, samples)


def _waiting_at_once(evidence: Evidence, loader: LoaderFacts, gain: float) -> tuple[str, float]:
    """As many workers as have a batch ready for each step, or a disk that lets nobody wait.

    Workers that are waited for load all the time. What of that is work remains, and on a CPU the training does without.
    """
    ready = max(1 - gain, loader.workers / _MOST_WORKERS)
    on_gpu, busy = evidence.measured.device == "cuda", loader.workers * loader.workers_busy
    work = 0.0 if on_gpu else busy / evidence.processors_a_rank
    workers = math.ceil(loader.workers / ready)
    if workers <= loader.workers:
        return "a faster disk", max(0.0, gain - work)
    fix = f"num_workers={workers}, as waiting needs no processor; or a faster disk"
    return fix, max(0.0, 1 - ready - work)


def _epoch_start(evidence: Evidence) -> Iterator[Finding]:
    loader, steps = evidence.measured.loader, evidence.watched.steps
    usual = mean_seconds(evidence.watched)
    edges = [step for step in steps if not step.regular]
    if loader is None or not edges or loader.persistent_workers or not loader.workers:
        return
    extra = sum(max(0.0, step.input - fmean(one.input for one in regular_steps(evidence.watched))) for step in edges)
    yield Finding(
        "input.epoch_start",
        "workers are started anew for each epoch",
        f"{format_seconds(extra / len(edges))} each of {len(edges)} times; other steps take {format_seconds(usual)}",
        extra / sum(step.seconds for step in steps),
        "DataLoader(..., persistent_workers=True)",
        loader.line,
        "loader" if loader.can_be_replaced else "",
    )


def _copy(evidence: Evidence) -> Iterator[Finding]:
    loader, share = evidence.measured.loader, evidence.shares["copy"]
    measured = saved("copy", evidence.ablations)
    gain = share if measured is None else max(0.0, measured)
    pinned = loader is not None and loader.pin_memory
    evidence_text = f"{share:.0%} of a step; the DataLoader gives {'page-locked' if pinned else 'pageable'} memory"
    fix = "copy a batch ahead: for batch in hotloop.prefetch(loader)"
    if not pinned:
        fix = f"DataLoader(..., pin_memory=True) and .to(device, non_blocking=True); or {fix}"
    yield Finding("copy", "the GPU waits for copies from the host", evidence_text, gain, fix, outside="prefetch")


def _sync(evidence: Evidence) -> Iterator[Finding]:
    share, measured = evidence.shares["sync"], saved("sync", evidence.ablations)
    lines = sorted(evidence.measured.sync_lines.items(), key=lambda item: -item[1])
    if not lines:
        return
    where, _, call = lines[0][0].rpartition(" ")
    named = ", ".join(f"{line} {format_seconds(seconds)}" for line, seconds in lines[:3])
    told = f"{share:.0%} of a step the GPU rests after such a wait; the longest: {named}"
    gain = share if measured is None else max(0.0, measured)
    fix = "keep values on the device and read them every 50 steps"
    if evidence.measured.waits >= _MANY and evidence.watched.looks:
        whole = evidence.watched.lines.get(where, 0) / evidence.watched.looks
        gain = max(gain, min(max(whole, _without_line(evidence, where)), 1 - evidence.shares["compute"]))
        told += f"; a step waits {evidence.measured.waits:.0f} times, and that line takes {whole:.0%} of it"
        fix = "read all values of a tensor at once, by tolist(), or every 50 steps"
    yield Finding(
        "sync", "the host waits for the GPU, which then waits for the host", told, gain,
        f"{fix} ({call} waits each time)", where,
    )  # fmt: skip


def _without_line(evidence: Evidence, where: str) -> float:
    """What steps save that wait for nothing, and in which that line takes no time.

    What is left of them is shorter than the rest of a whole step: a thread of torch's that has slept for long takes
    long to wake up. 2.4 ms were 1.3 ms once the line was mended (bench/bottlenecks/sync_bound.py, H200).
    """
    block = evidence.measured.block(PROOFS["sync"])
    if not block or not block.looks:
        return 0.0
    left = mean_seconds(block) * (1 - block.lines.get(where, 0) / block.looks)
    loading = max(0.0, evidence.gain(PROOFS["input"]) or 0.0)  # which those steps do not wait for either
    return 1 - left / mean_seconds(evidence.watched) - loading


def _launch(evidence: Evidence) -> Iterator[Finding]:
    share, own = evidence.shares["launch"], sum(evidence.watched.lines.values())
    python = max(0.0, evidence.shares["other"] - evidence.compiling)
    models = python * evidence.watched.in_models / own if share and own else 0.0
    and_models = f", and {models:.0%} while it runs the model's own Python" if models >= _WORTH_SAYING else ""
    used, total = (evidence.measured.memory.get(f"{name}_bytes", 0.0) for name in ("peak", "total"))
    room = f"; {format_bytes(used)} of its {format_bytes(total)} are in use" if 0 < used < _ROOM * total else ""
    yield Finding(
        "launch",
        "the host launches kernels more slowly than the GPU runs them",
        f"{share:.0%} of a step the GPU rests while the host is at work inside of torch{and_models}{room}",
        share + models,
        f'model = torch.compile(model, mode="reduce-overhead"){", or larger batches" if room else ""}',
        outside="compile",
    )


def _page_faults(evidence: Evidence) -> Iterator[Finding]:
    kept = evidence.certain("kept_memory")
    if not kept:
        return
    yield Finding(
        "memory.page_faults",
        "memory that a step frees goes back to the system, which hands it out again page by page",
        f"{evidence.measured.memory['num_page_faults_a_step']:,.0f} page faults a step",
        kept.gain,
        f"{KEEPING} in the environment",
        outside="allocator",
    )


def _memory(evidence: Evidence) -> Iterator[Finding]:
    memory = evidence.measured.memory
    allocations, frees = memory.get("num_device_alloc_a_step", 0.0), memory.get("num_device_free_a_step", 0.0)
    if allocations < 0.5 or frees < 0.5:
        return
    cleared = memory.get("num_empty_caches_a_step", 0.0)
    why = f", torch.cuda.empty_cache() {cleared:.1f} times" if cleared else ""
    share = evidence.gain("no_empty_cache")
    if share is None:
        share = evidence.shares["sync"] + evidence.shares["launch"] + evidence.shares["other"]
    yield Finding(
        "memory.thrash",
        "GPU memory is given back and asked for again and again",
        f"{allocations:.1f} allocations and {frees:.1f} frees of the driver a step{why}",
        share,
        "take empty_cache() out" if cleared else "smaller batches, or PYTORCH_ALLOC_CONF=expandable_segments:True",
    )


def _threads(evidence: Evidence) -> Iterator[Finding]:
    measured = evidence.gain("fewer_threads")
    threads, ranks = int(evidence.measured.facts["threads"]), evidence.measured.local_world_size
    if measured is None:
        return
    right = evidence.processors_a_rank
    yield Finding(
        "threads.oversubscribed",
        "more threads than processors",
        f"{threads} threads of torch's in {count(ranks, 'process', 'processes')} on {evidence.processors} processors; "
        f"they waited for one {evidence.watched.queued:.0%} of the time",
        max(0.0, measured),
        f"OMP_NUM_THREADS={right}, or torch.set_num_threads({right})",
        outside="threads",
    )


def _recompiles(evidence: Evidence) -> Iterator[Finding]:
    steps = evidence.watched.steps
    compiled = [step for step in steps if step.compiling]
    if not compiled:
        return
    seconds = sum(step.compiling for step in compiled)
    yield Finding(
        "recompiles",
        "torch.compile compiles again while training",
        f"after warm-up {len(compiled)} of {len(steps)} steps compiled, {format_seconds(seconds / len(compiled))} each",
        seconds / sum(step.seconds for step in steps),
        'pad to one shape, or torch.compile(..., dynamic=True); TORCH_LOGS="recompiles" names the reason',
    )


def _python(evidence: Evidence) -> Iterator[Finding]:
    share, lines = evidence.shares["other"], dict(evidence.watched.lines)
    loader = evidence.measured.loader
    own = {line: seen for line, seen in lines.items() if not loader or line != loader.line}
    if not own:
        return
    total = sum(lines.values())
    where = max(own, key=lambda line: own[line])
    named = evidence.compiling + max(0.0, evidence.gain("no_empty_cache") or 0.0)  # by findings of their own
    gain = max(0.0, share - named)
    on_gpu, most = evidence.measured.device == "cuda", share == max(evidence.shares.values())
    if on_gpu and most and evidence.watched.looks:  # a trace makes the launches between longer
        seen = (sum(own.values()) - evidence.watched.in_models) / evidence.watched.looks
        gain = max(gain, min(seen, 1 - evidence.shares["compute"]) - named)
    yield Finding(
        "other.python",
        "the script's own Python holds the training up",
        f"{share:.0%} of a step is neither input nor torch; {where} was being run {own[where] / total:.0%} of the time",
        gain,
        "do it less often, or outside of the training process",
        where,
    )


def _ranks(evidence: Evidence) -> Iterator[Finding]:
    slow, others = slow_rank(evidence.ranks), evidence.ranks
    if slow:
        waiting = fmean(rank.waiting for rank in others if rank is not slow)
        kind = max(slow.shares, key=lambda kind: slow.shares[kind] - fmean(rank.shares[kind] for rank in others))
        yield Finding(
            "slow_rank",
            f"rank {slow.rank} is slower than the others",
            f"they wait for it {waiting:.0%} of a step; it spends {slow.shares[kind]:.0%} of its own on {kind}",
            waiting,
            f"look into rank {slow.rank}: its card, its processors, its part of the data",
        )
    if others:
        real = min(rank.shares["communication"] for rank in others)
        without = saved("communication", evidence.ablations)
        yield Finding(
            "communication",
            "gradients are on their way while nothing is computed",
            f"{real:.0%} of a step, what ranks wait for each other not counted",
            real if without is None else max(0.0, without),
            "more accumulation, gradients as bf16 (bf16_compress_hook), or a faster link",
        )


def _float32(evidence: Evidence) -> Iterator[Finding]:
    lower = evidence.beyond_batches("bfloat16")
    if not lower:
        return
    products = "in TF32" if evidence.measured.facts["tf32"] else "without tensor cores"
    yield Finding(
        "compute.float32",
        "the model computes in float32",
        f"its matrix products {products}; under autocast to bfloat16 a step took {format_seconds(lower.step_seconds)}",
        lower.gain,
        'with torch.autocast("cuda", dtype=torch.bfloat16): around the model and the loss',
        outside="bf16",
    )


def _data_parallel(evidence: Evidence) -> Iterator[Finding]:
    alone = evidence.beyond_batches("first_gpu_alone")
    if not alone:
        return
    yield Finding(
        "data_parallel",
        "DataParallel copies the model to all GPUs and gathers results from them, in each step and from one process",
        f"where the first GPU did its part and nothing else, a step took {format_seconds(alone.step_seconds)}",
        alone.gain,
        "DistributedDataParallel, a process for each GPU: torchrun --nproc_per_node gpu",
    )
