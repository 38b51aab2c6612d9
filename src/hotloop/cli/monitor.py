"""`hotloop monitor`."""

import json
import re
from pathlib import Path

import click

from hotloop.core.errors import InputError, cannot_write


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def monitor() -> None:
    """Write alert rules and dashboards for Prometheus and Grafana."""


@monitor.command()
@click.option("--docs", default="", metavar="URL", help="Where this documentation is served, for links in alerts.")
def rules(docs: str) -> None:
    """Print recording and alert rules for Prometheus.

    hotloop monitor rules > /etc/prometheus/hotloop.yml
    """
    from hotloop.monitor.rules import rules

    if docs and not re.fullmatch(r"https?://[^\s{}]+", docs):
        cause = "alerts would link to what is no page, or Prometheus would take it for a template"
        raise InputError(f"--docs {docs!r} is no address of a web page", cause, "--docs https://HOST/PATH")
    click.echo(rules(docs), nl=False)


@monitor.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
def dashboards(folder: Path) -> None:
    """Write Grafana dashboards into FOLDER: all machines, one machine, one training."""
    from hotloop.core.files import write_atomic
    from hotloop.monitor.dashboards import dashboards

    try:
        folder.mkdir(parents=True, exist_ok=True)
        for dashboard in dashboards():
            file = folder / f"{dashboard.uid}.json"
            write_atomic(file, json.dumps(dashboard.to_json(), indent=2) + "\n")
            click.echo(file)
    except OSError as error:
        raise cannot_write(folder, error, InputError) from None
