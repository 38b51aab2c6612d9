"""`hotloop run`."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from hotloop.core.units import count, format_bytes, format_seconds

if TYPE_CHECKING:
    from hotloop.core.speedup import Acceleration, Speedup


_CHOICES = ("level", "only", "without", "steps", "at_once")
"""Options that say what a file of settings says."""


@click.command(
    context_settings={
        "help_option_names": ["-h", "--help"], "ignore_unknown_options": False, "allow_interspersed_args": False,
    }
)  # fmt: skip
@click.option("--level", type=click.Choice(["exact", "fast"]), default="exact", show_default=True,
              help="Keep the script's own mathematics, or round it otherwise, guarded.")  # fmt: skip
@click.option("--only", multiple=True, metavar="NAME", help="Only this acceleration; may be repeated.")
@click.option("--without", multiple=True, metavar="NAME", help="Not this acceleration; may be repeated.")
@click.option("--steps", type=click.IntRange(2), help="Steps to time for each.  [default: 3 s of them]")
@click.option("--at-once", is_flag=True, help="Switch all on after the first steps, without timing each.")
@click.option("--settings", type=click.Path(path_type=Path), help="What `hotloop tune` has found for this script.")
@click.option("--json-summary", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Write what was done, and its gain, as JSON.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Say which accelerations would be tried, and start nothing.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def run(
    ctx: click.Context, level: str, only: tuple[str, ...], without: tuple[str, ...], steps: int | None, at_once: bool,
    settings: Path | None, json_summary: Path | None, dry_run: bool, command: tuple[str, ...],
) -> int:  # fmt: skip
    """Run a training script faster, without changing it.

    COMMAND is what you would type to train, after two dashes:

    \b
      hotloop run -- python train.py --epochs 3
      hotloop run --level fast -- torchrun --nproc_per_node 2 train.py

    The script starts as it is. Then accelerations are switched on one by one, each is timed, and what does not help is
    taken back. What one breaks goes on without it. A table at the end says what each has brought.
    """  # noqa: D301 - click's sign for lines that stay as they are
    from hotloop.accelerate.plan import Plan, chosen
    from hotloop.accelerate.script import run_script
    from hotloop.accelerate.settings import read_settings
    from hotloop.core.errors import InputError
    from hotloop.core.files import require_writable, write_atomic

    typed = [name for name in _CHOICES if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    if settings and typed:
        option = f"--{typed[0].replace('_', '-')}"
        cause = f"{settings} says what is switched on, and none of it is timed"
        raise InputError(f"{option} does not go with --settings", cause, f"leave out {option}, or edit {settings}")
    plan = (
        read_settings(settings)
        if settings
        else Plan(chosen(level, only, without), measure=not at_once, steps=steps or 0)
    )
    if dry_run:
        for line in _planned(plan.names):
            click.echo(line)
        return 0
    if not command:
        raise InputError("there is no command", "what to run comes after two dashes", "hotloop run -- python train.py")
    if json_summary:
        require_writable(json_summary, "--json-summary")
    found = run_script(command, plan, os.environ)
    if json_summary:
        write_atomic(json_summary, found.to_json().encode())
    sys.stdout.flush()
    for line in _lines(found):
        click.echo(line, err=True)
    return found.code


def _planned(names: tuple[str, ...]) -> Iterator[str]:
    from hotloop.accelerate.plan import kind_of

    for name in names:
        kind = kind_of(name)
        yield f"{name:<16} {kind.level:<6} {kind.what}"


def _lines(found: "Speedup") -> Iterator[str]:
    """A summary for a screen."""
    yield ""
    steps = f"{count(found.steps, 'step')} in all"
    if found.ratio and found.relative_error:
        times = f"{format_seconds(found.before_seconds)} -> {format_seconds(found.after_seconds)} a step"
        ratio = f"{found.ratio:.2f} ± {found.ratio * found.relative_error:.2f}"
        yield f"hotloop: {ratio} times as fast ({times}, {steps})"
    elif found.ratio:
        yield f"hotloop: nothing made a step of {format_seconds(found.after_seconds)} shorter ({steps})"
    elif found.steps:
        yield f"hotloop: how much faster is not known: it ended before anything was timed ({steps})"
    for one in found.accelerations:
        yield f"  {one.name:<16} {_gain(one):<18} {one.why}"
    for note in found.notes:
        yield f"  note: {note}"
    if found.memory:
        device = ""
        if "device_peak" in found.memory:
            peak, total = (format_bytes(found.memory[key]) for key in ("device_peak", "device_total"))
            device = f", {peak} of {total} on the GPU"
        yield f"  memory: {format_bytes(found.memory['host_peak'])} on the host{device}, at most"


def _gain(one: "Acceleration") -> str:
    if one.gain is None:
        return one.state
    return f"{one.state:<7} {-one.gain:+.1%} ± {one.error:.1%}"
