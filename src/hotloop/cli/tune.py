"""`hotloop tune`."""

import importlib.util
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hotloop.cli.duration import Duration
from hotloop.cli.ending import ended_by_signals
from hotloop.core.units import count, format_seconds

if TYPE_CHECKING:
    from hotloop.core.job import Job
    from hotloop.core.tuning import Settings, Trial, Tuning
    from hotloop.tune.job_trials import JobTrials
    from hotloop.tune.script_trials import ScriptTrials
    from hotloop.tune.space import Knob


class _JobOrCommand(click.Command):
    """A command comes after two dashes, as its options could be taken for ours."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta["dashes"] = "--" in args
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return ["[OPTIONS] JOB | -- COMMAND..."]


@click.command(cls=_JobOrCommand, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--budget", type=Duration(), default="5m", show_default=True, help="Time for all trials together.")
@click.option("--level", type=click.Choice(["exact", "fast"]), default="exact", show_default=True,
              help="A script: what `hotloop run` may change.")  # fmt: skip
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="A job: lay a value over the file's.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), default="tuned.toml", show_default=True,
              help="Where to write the settings and the evidence.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Say what would be tried, and start nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.argument("target", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def tune(
    ctx: click.Context, budget: float, level: str, overrides: tuple[str, ...], out: Path, dry_run: bool, as_json: bool,
    target: tuple[str, ...],
) -> int:  # fmt: skip
    """Find faster settings by short trials.

    TARGET is a job file, or a command after two dashes:

    \b
      hotloop tune job.toml           then: hotloop train job.toml --settings tuned.toml
      hotloop tune -- python train.py then: hotloop run --settings tuned.toml -- python train.py

    Each trial is a start of the training in a process of its own, ended after some steps. A script is ended without
    warning, but what it has written by then stays: let it write into a folder of no worth. Ctrl-C ends the search with
    the best so far.
    """  # noqa: D301 - click's sign for lines that stay as they are
    from hotloop.core.errors import InputError

    if importlib.util.find_spec("optuna") is None:
        raise InputError("tuning needs optuna", "it is not installed here", 'pip install "hotloop[tune]"')
    from hotloop.core.files import require_writable, write_atomic
    from hotloop.tune.search import Effort, Search
    from hotloop.tune.settings import job_settings, script_settings
    from hotloop.tune.space import size_of
    from hotloop.tune.targets import job_target, script_target

    require_writable(out, "--out")
    job: Job | None
    start: JobTrials | ScriptTrials
    if not ctx.meta["dashes"]:
        if len(target) > 1:
            what = f"{' '.join(target)}: one job file is tuned at a time"
            raise InputError(what, "a command comes after two dashes", f"hotloop tune -- {' '.join(target)}")
        space, start, job = job_target(Path(target[0]), overrides)
    else:
        space, start, job = script_target(target, level)
    if dry_run:
        for line in _planned(space):
            click.echo(line)
        return 0
    click.echo(
        f"{count(size_of(space), 'combination')} of {count(len(space), 'setting')}, {format_seconds(budget)} at most",
        err=True,
    )
    with ended_by_signals() as ending, start:
        search = Search(space, start, Effort(budget), lambda trial: click.echo(_line(trial, space), err=True))
        found = search.run(target)
    write_atomic(out, (job_settings(found, job) if job else script_settings(found)).encode())
    if as_json:
        click.echo(found.to_json())
    else:
        for line in _lines(found, space, out, overrides):
            click.echo(line)
    return ending.code if found.ended == "interrupted" else 0


def _planned(space: "tuple[Knob, ...]") -> Iterator[str]:
    for knob in space:
        yield f"{knob.name:<22} {', '.join(map(_text, knob.values))}"


def _line(trial: "Trial", space: "tuple[Knob, ...]") -> str:
    what = _changes(trial.settings, space)
    if trial.state == "failed":
        return f"  {'failed':<24} {what}: {trial.why}"
    share = trial.error / trial.sample_seconds
    told = f"{format_seconds(trial.sample_seconds)} ± {share:.1%}"
    return f"  {told:<24} {what}{' (ended early)' if trial.state == 'worse' else ''}"


def _changes(settings: "Settings", space: "tuple[Knob, ...]") -> str:
    now = {knob.name: knob.values[0] for knob in space}
    changed = [f"{name}={_text(value)}" for name, value in settings.items() if value != now[name]]
    return ", ".join(changed) or "as it is"


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _lines(found: "Tuning", space: "tuple[Knob, ...]", out: Path, overrides: tuple[str, ...]) -> Iterator[str]:
    ended = {"done": "", "budget": ", until the budget was used up", "interrupted": ", until it was interrupted"}
    trials = f"{count(len(found.trials), 'trial')} for {count(found.size, 'combination')}"
    tried = f"{trials}, {format_seconds(found.took_seconds)}{ended[found.ended]}"
    yield ""
    if found.ratio <= 1.0:
        yield f"nothing was {'' if found.certain else 'certainly '}faster than what there is"
        yield tried
        if found.ended == "budget":
            yield "more can be tried in more time: --budget"
        return
    sure = "" if found.certain else "; another setting may be as fast"
    yield f"{found.ratio:.2f} ± {found.error:.2f} times as fast with {_changes(found.best, space)}{sure}"
    yield tried
    laid_over = "".join(f" --set {shlex.quote(each)}" for each in overrides)
    use = f"hotloop train {found.target[0]} --settings {out}{laid_over}"
    if len(found.target) > 1 or not found.target[0].endswith(".toml"):
        use = f"hotloop run --settings {out} -- {shlex.join(found.target)}"
    yield f"to use it: {use}"
