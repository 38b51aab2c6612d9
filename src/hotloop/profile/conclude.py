"""From what the processes of a script have left to its profile."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hotloop import __version__
from hotloop.attach.activity import CROWDED
from hotloop.core.profile import Ablation, Finding, Profile, RankProfile
from hotloop.core.units import format_seconds
from hotloop.profile.findings import Evidence, findings
from hotloop.profile.measured import Measured
from hotloop.profile.shares import (
    PROOFS,
    ablations,
    mean_seconds,
    overhead_ratio,
    rank_profiles,
    regular_steps,
    shares,
    slow_rank,
    step_seconds,
    verdict,
)
from hotloop.profile.timeline import Timeline, read_trace, timeline

_PHRASES = {
    "input": "waits for data",
    "copy": "waits for copies to the GPU",
    "launch": "goes by while the host launches kernels too slowly",
    "sync": "is lost after waits of the host for the GPU",
    "compute": "is computing",
    "communication": "is communication that nothing hides",
    "other": "is spent in Python outside of torch",
}


def read_measured(folder: Path) -> list[Measured]:
    """What processes that train have left, by rank; of several of a rank the one that got furthest."""
    found = [Measured.load(file) for file in folder.glob("measured-*.json")]
    furthest = sorted(found, key=lambda one: (len(one.blocks), one.steps_seen))
    of_ranks = [one for _, one in sorted({one.rank: one for one in furthest}.items())]
    if len(trained := [one for one in found if one.blocks and not one.rank]) < 2:
        return of_ranks
    note = f"{len(trained)} processes trained: this is the one of which most was measured"
    return [replace(one, unseen=(*one.unseen, note)) for one in of_ranks]


def conclude(
    measured: Sequence[Measured], folder: Path, command: Sequence[str]
) -> tuple[Profile, Timeline | None, Path | None]:
    """The profile of a script whose processes have each measured the block "watched" at least, and what its trace says.

    With several ranks the slow one is told about, if there is one, else the first.
    """
    lines = [_line(one, folder) for one in measured]
    ranks = rank_profiles(measured, lines)
    slow = slow_rank(ranks)
    number = ranks.index(slow) if slow else 0
    one, line = measured[number], lines[number]
    found = shares(one, line)
    left_out = ablations(one, found["compute"])
    several = ranks if len(ranks) > 1 else ()
    causes = findings(Evidence(one, found, left_out, several))
    watched = one.block("watched")
    assert watched
    seconds, kind = step_seconds(watched), verdict(found, left_out)
    profile = Profile(
        command=tuple(command),
        device=one.device,
        device_name=one.device_name,
        steps_measured=len(regular_steps(watched)),
        step_seconds=seconds,
        shares=found,
        verdict=kind,
        sentence=_sentence(kind, found[kind], seconds.mean, causes, left_out, slow),
        ablations=left_out,
        overhead_ratio=overhead_ratio(one),
        findings=causes,
        ranks=several,
        operators=line.operators if line else (),
        notes=_notes(one),
        memory=one.memory,
        gpu_idle=line.gpu_idle if line else 0.0,
        versions={"hotloop": __version__, "torch": str(one.facts["torch"])},
    )
    return profile, line, folder / one.trace if one.trace else None


def _line(measured: Measured, folder: Path) -> Timeline | None:
    watched = measured.block("watched")
    assert watched
    return timeline(read_trace(folder / measured.trace), mean_seconds(watched)) if measured.trace else None


def _notes(measured: Measured) -> tuple[str, ...]:
    """What a reader has to know besides."""
    found = list(measured.unseen)
    if not measured.complete:
        found.append(f"the script ended while {measured.left_out.replace('_', ' ')} was tried")
    if not measured.trace:
        found.append("without a trace all but input counts as computing")
    watched, facts = measured.block("watched"), measured.facts
    assert watched
    fits = facts["threads"] * measured.local_world_size <= facts["processors"]
    if fits and watched.queued > CROWDED:
        loading = measured.loader and measured.loader.workers and measured.loader.is_busy
        others = "the DataLoader's workers" if loading else "something else"
        found.append(f"threads waited for a processor {watched.queued:.0%} of the time: used by {others}")
    return tuple(found)


def _sentence(
    kind: str, share: float, seconds: float, causes: Sequence[Finding], left_out: Sequence[Ablation],
    slow: RankProfile | None,
) -> str:  # fmt: skip
    text = f"{kind}-bound: {share:.0%} of each step of {format_seconds(seconds)} {_PHRASES[kind]}"
    if slow:
        text = f"rank {slow.rank}, which the others wait for, is {text}"
    without = next((one for one in left_out if one.name == PROOFS.get(kind)), None)
    if without:
        text += f"; without it a step took {format_seconds(without.step_seconds)}"
    cause = next((one for one in causes if one.id.startswith(kind)), None)
    return f"{text} ({cause.title})" if cause else text
