"""`hotloop profile`."""

import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hotloop.cli.ending import ended_by_signals
from hotloop.core.units import count, format_seconds

if TYPE_CHECKING:
    from hotloop.core.profile import Profile
    from hotloop.profile.compare import Change

_WIDTH = 40


class _ScriptOrCompare(click.Group):
    """What follows is a command to profile, unless it names one of our own."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] in self.commands:
            return super().resolve_command(ctx, args)
        return "--", _script, args

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return ["[OPTIONS] -- COMMAND..."]


@dataclass(frozen=True)
class _Options:
    """What precedes the command."""

    steps: int
    stop: bool
    out: Path | None
    tensorboard: bool
    tool: str
    as_json: bool


@click.group(cls=_ScriptOrCompare, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--steps", type=click.IntRange(2), help="Steps to measure under each condition.  [default: 6 s of them]")
@click.option("--stop/--go-on", default=True, show_default=True,
              help="End the script after the measurement, or let it train on; then without proof.")  # fmt: skip
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), help="Folder to make.  [default: profiles/NAME-N]"
)
@click.option("--tensorboard", is_flag=True, help="Write TensorBoard events as well.")
@click.option("--nsys", "tool", flag_value="nsys", help="Have Nsight Systems record steps instead.")
@click.option("--ncu", "tool", flag_value="ncu", help="Have Nsight Compute record steps instead.")
@click.option("--perf", "tool", flag_value="perf", help="Have Linux's perf record steps instead.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; what the script prints goes to stderr.")
@click.pass_context
def profile(
    ctx: click.Context, steps: int | None, stop: bool, out: Path | None, tensorboard: bool, tool: str | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Say where the time of a training goes, and prove it.

    COMMAND is what you would type to train, after two dashes:

    \b
      hotloop profile -- python train.py --epochs 3
      hotloop profile -- torchrun --nproc_per_node 2 train.py
      hotloop profile compare BEFORE.json AFTER.json --fail-if 'step_seconds > 1.05x'

    The script is not changed. Its steps are found, warm-up is skipped, and a bounded number of steps is measured: as
    they are, traced, and with parts left out, such as loading. Then the script is ended; what it saves on its way out
    was trained on repeated batches: let it save into a folder of no worth.
    """  # noqa: D301 - click's sign for lines that stay as they are
    from hotloop.core.errors import InputError

    if out and out.exists():
        raise InputError(f"{out} exists", "a profile is not written over another", f"--out {out}-2")
    ctx.obj = _Options(steps or 0, stop, out, tensorboard, tool or "", as_json)


@click.command(
    "--", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}, add_help_option=False
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def _script(options: _Options, command: tuple[str, ...]) -> int:
    """Profile a command."""
    from hotloop.profile.external import TOOLS, record
    from hotloop.profile.folder import next_folder
    from hotloop.profile.plan import Plan
    from hotloop.profile.script import profile_script

    results = options.out or next_folder(Path("profiles"), command)
    as_json, output = options.as_json, sys.stderr.fileno() if options.as_json else None
    plan = Plan(steps=options.steps, stop=options.stop, ablate=options.stop, progress=True)
    if options.tool:
        code, file = record(options.tool, command, plan, os.environ, results)
        click.echo(f"recorded: {file}\nto look at it: {TOOLS[options.tool].view} {file}")
        return code
    with ended_by_signals():
        outcome = profile_script(command, plan, os.environ, results, output, options.tensorboard)
    if outcome.profile is None:
        click.echo(f"hotloop: {outcome.failure}", err=True)
    elif as_json:
        click.echo(outcome.profile.to_json())
    else:
        for line in _lines(outcome.profile):
            click.echo(line)
    return outcome.code


@profile.command()
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
@click.option("--fail-if", "conditions", multiple=True, metavar="CONDITION", help="Exit with 1 if this holds.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def compare(before: Path, after: Path, conditions: tuple[str, ...], as_json: bool) -> int:
    """Show what changed between two profiles.

    A CONDITION is a figure of the table, a comparison, and a number, with x after it for a ratio of after to before:
    'step_seconds > 1.05x', 'shares.input > 0.2'.
    """
    import json
    from dataclasses import asdict
    from math import isfinite

    from hotloop.core.profile import Profile
    from hotloop.profile.compare import compare as changes_between
    from hotloop.profile.compare import is_met

    first, second = Profile.load(before), Profile.load(after)
    changes = changes_between(first, second)
    met = [condition for condition in conditions if is_met(condition, changes)]
    if as_json:
        rows = [{**asdict(change), "ratio": change.ratio if isfinite(change.ratio) else None} for change in changes]
        verdicts = {"before": first.verdict, "after": second.verdict}
        click.echo(json.dumps({"changes": rows, "verdicts": verdicts, "failed": met}))
    else:
        for line in _table(first, second, changes):
            click.echo(line)
        for condition in met:
            click.echo(f"failed: {condition}")
    return int(bool(met))


def _lines(profile: "Profile") -> Iterator[str]:
    """A profile for a screen."""
    seconds = profile.step_seconds
    yield ""
    yield profile.sentence
    yield ""
    yield (
        f"a step takes {format_seconds(seconds.mean)} (median {format_seconds(seconds.median)}, tenths "
        f"{format_seconds(seconds.p10)} to {format_seconds(seconds.p90)}), {count(profile.steps_measured, 'step')} on "
        f"{profile.device_name}"
    )
    for kind, share in profile.shares.items():
        if share >= 0.0005:
            yield f"  {kind:<13} {share:>6.1%}  {'█' * max(1, round(share * _WIDTH))}"
    if profile.ablations:
        yield "left out, and timed again:"
        for one in profile.ablations:
            name = one.name.replace("_", " ")
            doubt = "" if one.is_certain or one.gain <= 0 else ", which may be chance"
            yield f"  {name:<18} a step takes {format_seconds(one.step_seconds)}, {one.gain:.1%} saved{doubt}"
    for finding in profile.findings:
        yield ""
        yield f"{finding.gain_at_most:>5.1%} at most: {finding.title}"
        yield f"       {finding.evidence}"
        yield f"       fix: {finding.fix}"
        if finding.outside:
            yield f"       from outside: hotloop run --only {finding.outside} -- {shlex.join(profile.command)}"
        if finding.location:
            yield f"       at {finding.location}"
    yield ""
    for text in profile.notes:
        yield f"note: {text}"
    yield f"watching lengthened a step by {profile.overhead_ratio:.1%}"
    for name, file in profile.files.items():
        yield f"{name}: {file}"


def _table(before: "Profile", after: "Profile", changes: list["Change"]) -> Iterator[str]:
    yield f"{'':<22} {'before':>10} {'after':>10} {'ratio':>8}"
    for change in changes:
        if not change.before and not change.after:
            continue
        known = change.name.endswith("_seconds") or change.name == "step_seconds"
        texts = [format_seconds(value) if known else f"{value:.1%}" for value in (change.before, change.after)]
        spread = f"  ± {change.spread:.2f}" if change.spread else ""
        yield f"{change.name:<22} {texts[0]:>10} {texts[1]:>10} {change.ratio:>7.2f}x{spread}"
    yield f"{'verdict':<22} {before.verdict:>10} {after.verdict:>10}"
