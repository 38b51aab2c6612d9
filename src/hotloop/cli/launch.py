"""`hotloop launch`."""

import json
import os
import shlex
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
    from hotloop.launch.engine import Document, Engine
    from hotloop.launch.finding import LaunchFinding
    from hotloop.launch.record import Launch
    from hotloop.launch.request import Request
    from hotloop.launch.status import Status

_HELP = {"help_option_names": ["-h", "--help"]}
_ENGINES = ("local", "slurm", "kubernetes", "ray")
_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
_root = click.option(
    "--root", default=".", type=click.Path(exists=True, file_okay=False, path_type=Path),
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
@click.option(
    "--sweep", "sweeps", multiple=True, metavar="KEY=[V, V]", help="A run for each value; repeated, of each pair."
)
@click.option("--dry-run", is_flag=True, help="Print what would be sent, and send nothing.")
@click.option("--watch", is_flag=True, help="Show what it writes until it has ended. 0: finished; 75: saved; else 1.")
@_json
def start(
    file: Path, on: str, nodes: int | None, gpus: int | None, overrides: tuple[str, ...], sweeps: tuple[str, ...],
    dry_run: bool, watch: bool, as_json: bool,
) -> int:  # fmt: skip
    """Start a job."""
    from hotloop.launch.engine import engine_of
    from hotloop.launch.request import make_request
    from hotloop.launch.sweep import points

    engine, now = engine_of(on), datetime.now()
    requests, runs = [], points(sweeps)
    for place, point in enumerate(runs):
        job = load_job(file, [*overrides, *point])
        suffix = f"-{place}" if sweeps else ""
        requests.append(make_request(job, nodes, gpus, engine.gpus, Path.cwd(), now, suffix))
    first, documents = requests[0], engine.documents(requests)
    if watch and sweeps:
        raise InputError(
            "--watch with --sweep", "one can be watched at a time", "hotloop launch logs NAME --follow, afterwards"
        )
    if dry_run:
        _tell_points([request.name for request in requests], runs)
        click.echo(_planned(documents, first, on, _findings(first, documents, on), as_json))
        return 0
    launched = _submit(engine, requests, on)
    _tell_points([one.name for one in launched], runs)
    findings = _findings(first, engine.documents(requests), on)  # with what the engine was asked meanwhile
    _tell(first, launched, findings, as_json)
    if watch:
        return _watch(engine, launched[0], as_json)
    if as_json:
        objects = [asdict(one) for one in launched]
        click.echo(json.dumps({**(objects[0] if not sweeps else {"launches": objects}), **_settled(first, findings)}))
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
    written = False
    for text in engine_of(found.on).log(found, follow):
        click.echo(text, nl=False)
        written = written or bool(text)
    if not written:
        click.echo(f"{found.name} has written nothing; hotloop launch status says how it stands", err=True)
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
    before = _status(found, alone=False)
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


def _findings(first: "Request", documents: "Sequence[Document]", on: str) -> "list[LaunchFinding]":
    from hotloop.launch.findings import launch_findings

    here = sorted(os.listdir("/sys/class/net")) if on == "local" else None
    return [
        *launch_findings(first, on, os.environ, here),
        *(one for document in documents for one in document.findings),
    ]


def _submit(engine: "Engine", requests: "Sequence[Request]", on: str) -> "list[Launch]":
    """Hand them over; nothing is left if the engine refuses them."""
    from hotloop.launch.process import NoAnswer
    from hotloop.launch.record import Launch, claim, keep, one_at_a_time

    engine.check(requests[0])
    with one_at_a_time(requests[0]):
        _refuse_twice(requests)
        claimed = [claim(request) for request in requests]
        try:
            identities = engine.submit(claimed)
        except NoAnswer:
            raise
        except HotloopError:
            for request in claimed:
                shutil.rmtree(request.folder)
            raise
        submitted = datetime.now(UTC).isoformat(timespec="seconds")
        return [
            keep(Launch(one.name, on, identity, one.nodes, one.gpus, submitted, os.uname().nodename,
                        str(one.folder), str(one.run_dir)))
            for one, identity in zip(claimed, identities, strict=True)
        ]  # fmt: skip


def _refuse_twice(requests: "Sequence[Request]") -> None:
    """Raise InputError if something trains in one of these runs already."""
    from hotloop.launch.record import list_launches

    runs = {str(request.run_dir) for request in requests if request.named}
    for other in list_launches(requests[0].run_dir.parent):
        if other.run_dir in runs and not _status(other, alone=True).ended:
            raise InputError(
                f"{other.run_dir} is in use", f"launch {other.name} on {other.on} trains in it",
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
        return Status("unknown", error.what)


def _settled(request: "Request", findings: "Sequence[LaunchFinding]") -> dict[str, Any]:
    return {"environment": dict(request.environment), "findings": [asdict(one) for one in findings]}


def _planned(
    documents: "Sequence[Document]", request: "Request", on: str, findings: "Sequence[LaunchFinding]", as_json: bool
) -> str:
    """What would be sent."""
    if as_json:
        whole = {"name": request.name, "on": on, "nodes": request.nodes, "gpus": request.gpus,
                 "run_dir": str(request.run_dir), "documents": {one.name: one.text for one in documents}}  # fmt: skip
        return json.dumps({**whole, **_settled(request, findings)})
    for one in findings:
        click.echo(f"warning: {one.what}\nfix:     {one.fix}", err=True)
    return "\n".join(one.text for one in documents).rstrip("\n")


def _tell(
    request: "Request", all_launched: "Sequence[Launch]", findings: "Sequence[LaunchFinding]", as_json: bool
) -> None:
    from hotloop.launch.network import network_variables
    from hotloop.launch.record import list_launches

    launched = all_launched[0]
    each = f", {count(launched.gpus, 'GPU')} each" if launched.gpus else ""
    lines = [f"{one.name} on {one.on} as {one.id}: {count(one.nodes, 'machine')}{each}" for one in all_launched]
    why = {one.name: one.why for one in network_variables(request.job.launch)}
    why |= dict.fromkeys(request.job.launch.environment, "launch.environment")
    lines += [f"{name}={value}: {why[name]}" for name, value in request.environment.items()]
    lines += [f"warning: {one.what}\nfix:     {one.fix}" for one in findings]
    found_here = any(one.folder == launched.folder for one in list_launches(Path.cwd()))
    where = "" if found_here else f" --root {shlex.quote(str(request.run_dir.parent))}"
    words = [f"hotloop launch {verb} {launched.name}{where}" for verb in ("logs", "cancel")]
    lines += [f"what it writes: {words[0]} --follow; stop: {words[1]}"]
    click.echo("\n".join(lines), err=as_json)


def _tell_points(names: "Sequence[str]", runs: "Sequence[Sequence[str]]") -> None:
    """What each run of a sweep has of its own."""
    for name, point in zip(names, runs, strict=True):
        if point:
            click.echo(f"{name}: {', '.join(point)}", err=True)


def _watch(engine: "Engine", launched: "Launch", as_json: bool) -> int:
    """Show what it writes, and how it stands whenever that changes, until it has ended."""
    from hotloop.launch.status import exit_code

    told: Status | None = None
    asked = 0.0
    try:
        for text in engine.log(launched, follow=True):
            click.echo(text, nl=False, err=as_json)
            if time.monotonic() - asked >= engine.look_seconds:
                now, asked = _status(launched, alone=False), time.monotonic()
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
