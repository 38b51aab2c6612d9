"""`hotloop watch`."""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hotloop.cli.number import Number
from hotloop.core.errors import InputError

if TYPE_CHECKING:
    from hotloop.monitor.reading import Host
    from hotloop.monitor.watched import View

_PASSWORD_FROM = "HOTLOOP_WATCH_PASSWORD"  # noqa: S105, a name


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--url", metavar="URL", help="Of the exporter of another host.  [default: this machine]")
@click.option("--user", default="", metavar="NAME", help=f"For --url; the password comes from {_PASSWORD_FROM}.")
@click.option("--ca", type=click.Path(path_type=Path), metavar="FILE", help="Certificates that --url is checked with.")
@click.option("--interval", type=Number(0.2, 3600), default=1.0, show_default=True, metavar="SECONDS",
              help="Between two looks.")  # fmt: skip
@click.option("--once", is_flag=True, help="Print what there is and end.")
@click.option("--json", "as_json", is_flag=True, help="With --once: print one JSON object.")
@click.option("--demo", is_flag=True, help="Show an invented host of 8 H200 and its jobs.")
def watch(url: str | None, user: str, ca: Path | None, interval: float, once: bool, as_json: bool, demo: bool) -> int:
    """Show cards and trainings together, live.

    Keys: s sorts, l draws the next figure, Enter shows all of a job, q ends.
    """
    if as_json and not once:
        raise InputError("--json needs --once", "the live page prints nothing", "hotloop watch --once --json")
    if url and demo:
        raise InputError("--url and --demo", "an invented host has no address", "leave one of them out")
    if (user or ca) and not url:
        raise InputError("--user and --ca need --url", "this machine asks for neither", "--url https://HOST:9400")
    try:
        host, place = _host(url, user, ca, demo)
    except ImportError as error:
        cause = f"{error.name} is not installed"
        raise InputError("watching needs hotloop[monitor]", cause, 'pip install "hotloop[monitor]"') from None
    from hotloop.monitor.watched import Watched

    try:
        watched = Watched(host)
        if once:
            view = watched.look()
            if as_json:
                click.echo(json.dumps(_plain(view)))
            else:
                _print(view)
        elif not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise InputError("this is no terminal", "the live page needs one", "hotloop watch --once")
        else:
            from hotloop.monitor.screen import Watch

            Watch(watched, place, interval).run()
    finally:
        host.close()
    return 0


def _host(url: str | None, user: str, ca: Path | None, demo: bool) -> "tuple[Host, str]":
    if url:
        from hotloop.monitor.remote import RemoteHost

        remote = RemoteHost(url, user, os.environ.get(_PASSWORD_FROM, ""), ca)
        return remote, remote.place
    if demo:
        from hotloop.monitor.demo import Demo

        return Demo(), "an invented host"
    from hotloop.monitor.host import ThisHost

    return ThisHost(), os.uname().nodename


def _plain(view: "View") -> dict[str, Any]:
    """Readings that are not there are left out."""
    found = asdict(view)
    for card in found["cards"]:
        card["ecc_errors"] = {" ".join(key): number for key, number in card["ecc_errors"].items()}
    for job in found["jobs"]:
        live = job.pop("live")
        totals = {f"{name}_total": live.pop(name) for name in ("step_seconds", "wait_seconds")}
        job |= {**live, **totals, **job, "card": job["card"] and job["card"]["uuid"]}
    return {
        "driver": view.driver,
        "cards": [_filled(card) for card in found["cards"]],
        "jobs": [_filled(job) for job in found["jobs"]],
    }


def _filled(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None and value not in ({}, (), "")}


def _print(view: "View") -> None:
    """Two tables, and what stands out."""
    from hotloop.cli.table import print_table
    from hotloop.monitor.lines import CARD_COLUMNS, JOB_COLUMNS, card_cells, job_cells, verdicts

    if view.cards:
        print_table(CARD_COLUMNS, [card_cells(card) for card in view.cards])
    else:
        click.echo("no NVIDIA card answers")
    if view.jobs:
        print_table(JOB_COLUMNS, [job_cells(job) for job in view.jobs])
    else:
        click.echo("nothing trains here")
    for line in verdicts(view.jobs):
        click.echo(line)
