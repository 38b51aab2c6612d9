"""`hotloop launch`."""

import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hotloop.core.errors import HotloopError, InputError
from hotloop.core.job_file import load_job
from hotloop.core.units import count

if TYPE_CHECKING:
    from hotloop.launch.engine import Engine
    from hotloop.launch.network import Contradiction
    from hotloop.launch.record import Launch
    from hotloop.launch.request import Request
    from hotloop.launch.status import Status

_HELP = {"help_option_names": ["-h", "--help"]}
_ENGINES = ("local", "slurm", "ray")
_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
_root = click.option(
    "--root", default=".", type=click.Path(file_okay=False, path_type=Path),
    help="In which runs are written, or a folder above; by default here.",
)  # fmt: skip


class _JobOrCommand(click.Group):
    """A group whose first word may be a job file, too."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = ["start", *args]
        return super().parse_args(ctx, args)

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage(ctx.command_path, "JOB [OPTIONS]")
        formatter.write_usage(ctx.command_path, "status|logs|cancel [NAME]")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        start.format_options(ctx, formatter)
        with formatter.section("Commands"):
            commands = [(name, one) for name, one in self.commands.items() if not one.hidden]
            formatter.write_dl([(name, one.get_short_help_str(80)) for name, one in commands])


@click.group(cls=_JobOrCommand, context_settings=_HELP)
def launch() -> None:
    """Start a job on an engine: this machine, or a cluster.

    The engine starts it again after an interruption, and it goes on where it was.
    """


@launch.command(hidden=True, context_settings=_HELP)
@click.argument("file", metavar="JOB", type=click.Path(path_type=Path))
@click.option("--on", type=click.Choice(_ENGINES), default="local", show_default=True, help="The engine.")
@click.option("--nodes", type=click.IntRange(1), metavar="N", help="Machines, in place of launch.nodes.")
@click.option("--gpus", type=click.IntRange(0), metavar="N", help="Of each machine, in place of launch.gpus.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Lay a value over the file's.")
@click.option("--dry-run", is_flag=True, help="Print what would be sent, and send nothing.")
@click.option("--watch", is_flag=True, help="Show what it writes until it has ended, and exit as it does.")
@_json
def start(
    file: Path, on: str, nodes: int | None, gpus: int | None, overrides: tuple[str, ...], dry_run: bool, watch: bool,
    as_json: bool,
) -> int:  # fmt: skip
    """Start a job."""
    from hotloop.launch.engine import engine_of
    from hotloop.launch.network import contradictions
    from hotloop.launch.request import make_request

    job = load_job(file, overrides)
    engine = engine_of(on)
    request = make_request(job, nodes, gpus, engine.gpus, Path.cwd(), datetime.now())
    here = sorted(os.listdir("/sys/class/net")) if on == "local" else None
    findings = contradictions(job.launch, request.nodes, os.environ, here)
    if dry_run:
        click.echo(_planned(engine, request, on, findings, as_json))
        return 0
    launched = _submit(engine, request, on)
    _tell(request, launched, findings, as_json)
    if watch:
        return _watch(engine, launched, as_json)
    if as_json:
        click.echo(json.dumps({**asdict(launched), **_settled(request, findings)}))
    return 0


@launch.command(context_settings=_HELP)
@click.argument("name", required=False)
@_root
@_json
def status(name: str | None, root: Path, as_json: bool) -> int:
    """Say how launches stand: one by its name or the engine's id, or all."""
    from hotloop.launch.record import find_launch, list_launches

    found = [find_launch(name, root)] if name else list_launches(root)
    rows = [(one, _status(one, alone=name is not None)) for one in found]
    if as_json:
        objects = [{**asdict(one), **asdict(stand)} for one, stand in rows]
        click.echo(json.dumps(objects[0] if name else {"launches": objects}))
    elif not rows:
        click.echo(f"no launches in {root}")
    else:
        _print_table(rows)
    return 0


@launch.command(context_settings=_HELP)
@click.argument("name")
@click.option("--follow", "-f", is_flag=True, help="Go on until it has ended.")
@_root
def logs(name: str, follow: bool, root: Path) -> int:
    """Print what a launch has written."""
    from hotloop.launch.engine import engine_of
    from hotloop.launch.record import find_launch

    found = find_launch(name, root)
    for text in engine_of(found.on).log(found, follow):
        click.echo(text, nl=False)
    return 0


@launch.command(context_settings=_HELP)
@click.argument("name")
@_root
@_json
def cancel(name: str, root: Path, as_json: bool) -> int:
    """Have a launch save and stop, and not start again."""
    from hotloop.launch.engine import engine_of
    from hotloop.launch.record import find_launch

    found = find_launch(name, root)
    engine = engine_of(found.on)
    before = engine.status(found)
    if not before.ended:
        found.cancel_file.touch()
        engine.cancel(found)
    if as_json:
        click.echo(json.dumps({**asdict(found), "asked": not before.ended, "before": before.state}))
    else:
        click.echo(f"{found.name} has ended already: {before.state}" if before.ended else f"{found.name} is to stop")
    return 0


@launch.command("ray-driver", hidden=True, context_settings=_HELP)
@click.argument("plan", type=click.Path(path_type=Path))
def ray_driver(plan: Path) -> int:
    """Run what a launch on Ray has planned; Ray, or the launch, starts this."""
    from hotloop.cli.ray_driver import drive

    return drive(plan)


def _submit(engine: "Engine", request: "Request", on: str) -> "Launch":
    """Hand it over; nothing is left if that fails."""
    from hotloop.launch.record import Launch, keep, prepare_folder

    _refuse_twice(request)
    engine.documents(request)
    engine.check(request)
    prepare_folder(request)
    try:
        identity = engine.submit(request)
    except BaseException:
        shutil.rmtree(request.folder)
        raise
    submitted = datetime.now(UTC).isoformat(timespec="seconds")
    return keep(
        Launch(request.name, on, identity, request.nodes, request.gpus, submitted, os.uname().nodename,
               str(request.folder), str(request.run_dir))
    )  # fmt: skip


def _refuse_twice(request: "Request") -> None:
    """Raise InputError if something trains in that run already."""
    from hotloop.launch.record import list_launches

    for other in list_launches(request.run_dir.parent):
        if other.run_dir == str(request.run_dir) and not _status(other, alone=True).ended:
            raise InputError(
                f"{request.run_dir} is in use", f"launch {other.name} on {other.on} trains in it",
                f"hotloop launch cancel {other.name}, or another run.dir",
            )  # fmt: skip


def _status(launch: "Launch", alone: bool) -> "Status":
    """How it stands.

    Args:
        alone: whether an engine that cannot be asked is an error; otherwise it is a row of the table.
    """
    from hotloop.launch.engine import engine_of
    from hotloop.launch.status import Status

    try:
        return engine_of(launch.on).status(launch)
    except HotloopError as error:
        if alone:
            raise
        return Status("lost", f"cannot be asked: {error.what}")


def _settled(request: "Request", findings: "Sequence[Contradiction]") -> dict[str, Any]:
    return {"environment": dict(request.environment), "findings": [asdict(one) for one in findings]}


def _planned(
    engine: "Engine", request: "Request", on: str, findings: "Sequence[Contradiction]", as_json: bool
) -> str:  # fmt: skip
    """What would be sent."""
    documents = engine.documents(request)
    if as_json:
        whole = {"name": request.name, "on": on, "nodes": request.nodes, "gpus": request.gpus,
                 "run_dir": str(request.run_dir), "documents": {one.name: one.text for one in documents}}  # fmt: skip
        return json.dumps({**whole, **_settled(request, findings)})
    for one in findings:
        click.echo(f"warning: {one.what}\nfix:     {one.fix}", err=True)
    return "\n".join(one.text for one in documents).rstrip("\n")


def _tell(request: "Request", launched: "Launch", findings: "Sequence[Contradiction]", as_json: bool) -> None:
    from hotloop.launch.network import network_variables

    each = f", {count(launched.gpus, 'GPU')} each" if launched.gpus else ""
    lines = [f"{launched.name} on {launched.on} as {launched.id}: {count(launched.nodes, 'machine')}{each}"]
    lines += [f"{one.name}={one.value}: {one.why}" for one in network_variables(request.job.launch)]
    lines += [f"warning: {one.what}\nfix:     {one.fix}" for one in findings]
    lines += [
        f"what it writes: hotloop launch logs {launched.name} --follow; stop: hotloop launch cancel {launched.name}"
    ]
    click.echo("\n".join(lines), err=as_json)


def _watch(engine: "Engine", launched: "Launch", as_json: bool) -> int:
    """Show what it writes, and how it stands whenever that changes, until it has ended."""
    from hotloop.launch.status import exit_code

    told: Status | None = None
    asked = 0.0
    try:
        for text in engine.log(launched, follow=True):
            click.echo(text, nl=False, err=as_json)
            if time.monotonic() - asked >= engine.look_seconds:
                now, asked = engine.status(launched), time.monotonic()
                told = _tell_change(told, now)
    except KeyboardInterrupt:
        click.echo(f"\nit goes on; hotloop launch cancel {launched.name} stops it", err=True)
        raise
    last = engine.status(launched)
    _tell_change(told, last)
    if as_json:
        click.echo(json.dumps({**asdict(launched), **asdict(last)}))
    return exit_code(last.state)


def _tell_change(before: "Status | None", now: "Status") -> "Status":
    if before is None or replace(before, starts=0) != replace(now, starts=0):
        words = [now.state, f"on {now.hosts}" if now.hosts else "", f"({now.reason})" if now.reason else ""]
        click.echo("hotloop: " + " ".join(filter(None, words)), err=True)
    return now


def _print_table(rows: "Sequence[tuple[Launch, Status]]") -> None:
    from hotloop.cli.table import print_table

    header = ("launch", "state", "on", "id", "machines", "starts", "where", "why")
    print_table(header, [
        (one.name, stand.state, one.on, one.id, str(one.nodes), str(stand.starts or ""), stand.hosts, stand.reason)
        for one, stand in rows
    ])  # fmt: skip
