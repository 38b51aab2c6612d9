"""`hotloop job`."""

import json
from pathlib import Path

import click

from hotloop.core.job import Job
from hotloop.core.job_file import STARTERS, load_job, starter_toml


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def job() -> None:
    """Write and check job files."""


@job.command()
def schema() -> None:
    """Print the JSON schema of a job, for editors."""
    click.echo(json.dumps(Job.model_json_schema(), indent=2))


@job.command()
@click.option("--task", type=click.Choice(list(STARTERS)), default="images", help="What is to be trained.")
def init(task: str) -> None:
    """Print a starter file: every key, its default and what it does.

    hotloop job init > job.toml
    """
    click.echo(starter_toml(task), nl=False)


@job.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Lay a value over the file's.")
def check(file: Path, overrides: tuple[str, ...]) -> None:
    """Validate a job file and print it whole, defaults included."""
    click.echo(load_job(file, overrides).to_toml(), nl=False)
