"""`hotloop runs`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from hotloop.cli.table import print_table
from hotloop.core.compare import Comparison, compare_runs
from hotloop.core.run import Run, find_run, list_runs, plain
from hotloop.core.units import format_seconds

_root = click.option(
    "--root",
    default="runs",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of the runs.",
    show_default=True,
)
_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@_root
@_json
@click.pass_context
def runs(context: click.Context, root: Path, as_json: bool) -> None:
    """List and compare runs.

    Without a command: all runs in a folder, oldest first, with their status and result.
    """
    if context.invoked_subcommand:
        return
    found = list_runs(root)
    if as_json:
        click.echo(json.dumps({"runs": plain([_row(run) for run in found])}))
    elif not found:
        click.echo(f"no runs in {root}")
    else:
        print_table(("run", "status", "steps", "training", "samples/s", "metrics"), [_cells(run) for run in found])


@runs.command()
@click.argument("a")
@click.argument("b")
@_root
@_json
@click.pass_context
def compare(context: click.Context, a: str, b: str, root: Path, as_json: bool) -> None:
    """Say what differs between two runs and how their curves relate.

    A and B are names in the runs' folder, "latest", or paths.
    """
    outer = context.parent.params if context.parent else {}
    root = outer["root"] if context.get_parameter_source("root") is ParameterSource.DEFAULT else root
    as_json = as_json or outer["as_json"]
    comparison = compare_runs(find_run(a, root), find_run(b, root))
    if as_json:
        click.echo(json.dumps(plain(comparison.to_json())))
    else:
        _print_comparison(comparison)


def _row(run: Run) -> dict[str, Any]:
    result = run.result()
    return {
        "name": run.name,
        "directory": str(run.directory),
        "status": run.status(),
        "result": asdict(result) if result else None,
    }


def _cells(run: Run) -> tuple[str, ...]:
    result = run.result()
    if result is None:
        return run.name, run.status(), "", "", "", ""
    metrics = "  ".join(f"{name} {value:.4f}" for name, value in result.metrics.items())
    speed = f"{result.samples_per_second:,.0f}"
    return run.name, result.status, f"{result.steps:,}", format_seconds(result.train_seconds), speed, metrics


def _print_comparison(comparison: Comparison) -> None:
    names = (comparison.a, comparison.b)
    if comparison.settings:
        rows = [(key, *map(_shown, values)) for key, values in comparison.settings.items()]
        print_table(("setting", *names), rows)
    else:
        click.echo("settings: equal")
    rows = [(name, *map(_shown, values)) for name, values in comparison.results.items()]
    print_table(("result", *names), rows)
    for curve in comparison.curves:
        click.echo(curve.sentence)


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.4f}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
