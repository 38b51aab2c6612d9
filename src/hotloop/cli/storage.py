"""`hotloop storage`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hotloop.core.errors import InputError

if TYPE_CHECKING:
    from hotloop.core.job import Job
    from hotloop.storage.check import Finding
    from hotloop.storage.places import Place

_SIGNS = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "error": ("✗", "red")}
_NAMES = {"aws": "AWS", "gcp": "Google Cloud", "azure": "Azure"}
_help = {"help_option_names": ["-h", "--help"]}
_file = click.argument("file", type=click.Path(path_type=Path), metavar="JOB")
_set = click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key; may be repeated.")
_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@click.group(context_settings=_help)
def storage() -> None:
    """Say what a job may do in object storage, try it, and make keys."""


@storage.command(context_settings=_help)
@_file
@_set
@click.option("--provider", type=click.Choice(list(_NAMES)), help="Of several that the job uses.")
@click.option(
    "--region",
    envvar=["AWS_REGION", "AWS_DEFAULT_REGION"],
    default="",
    metavar="REGION",
    help="Of AWS.  [default: $AWS_REGION]",
)
@click.option("--data-key", default="", metavar="ARN", help="That data on AWS is encrypted with, if it is another one.")
@_json
def policy(
    file: Path, overrides: tuple[str, ...], provider: str | None, region: str, data_key: str, as_json: bool
) -> None:
    """Print the least that the job needs: nothing but its prefixes and what it does there.

    For AWS a policy of a role or user; for Google Cloud and Azure, commands that make roles with conditions. A job
    without anything in object storage has nothing to grant: exit code 2.
    """
    job, places = _read(file, overrides)
    there = dict.fromkeys(place.provider for place in places)
    if provider and provider not in there:
        has = " and ".join(_NAMES[one] for one in there)
        raise InputError(f"{file} uses nothing of {_NAMES[provider]}", f"it uses {has}", "leave --provider out")
    wanted = [one for one in there if provider in (None, one)]
    if len(wanted) > 1 and not as_json:
        has = " and ".join(_NAMES[one] for one in wanted)
        raise InputError(f"{file} uses {has}", "each has a policy of its own", f"--provider {wanted[0]}, or --json")
    found = {
        one: _policy(job, [place for place in places if place.provider == one], region, data_key) for one in wanted
    }
    if as_json:
        click.echo(json.dumps(found))
    elif wanted == ["aws"]:
        click.echo(json.dumps(found["aws"], indent=2))
    else:
        click.echo("\n".join(found[wanted[0]]))


def _policy(job: "Job", places: list["Place"], region: str, data_key: str) -> Any:
    from hotloop.storage.encryption import encryption
    from hotloop.storage.policy import aws_policy
    from hotloop.storage.roles import azure_commands, google_commands

    for place in places:
        if place.writes:
            encryption(job.storage, place.url)  # what cannot be asked for is not granted either
    if places[0].provider == "aws":
        return aws_policy(places, job.storage, region, data_key)
    return google_commands(places) if places[0].provider == "gcp" else azure_commands(places)


@storage.command(context_settings=_help)
@_file
@_set
@_json
def check(file: Path, overrides: tuple[str, ...], as_json: bool) -> int:
    """Try what the job does in object storage, with the credentials that are here.

    Also what it does not do: that should be refused. What is written is removed again. The exit code is 1 if something
    that the job does is not possible.
    """
    from hotloop.storage.check import check_storage

    job, _ = _read(file, overrides)
    findings = check_storage(job)
    failed = any(one.state == "error" for one in findings)
    if as_json:
        click.echo(json.dumps({"ok": not failed, "findings": [asdict(one) for one in findings]}))
    else:
        _print(findings)
    return int(failed)


@storage.command(context_settings=_help)
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
def key(file: Path) -> None:
    """Write a new key for storage.client_key, which its owner alone may read.

    Keep a copy of it: what was encrypted with it cannot be read without it. Its public half stays as secret: who has
    that can write what this key reads.
    """
    from hotloop.storage.client_key import make_key

    make_key(file)
    click.echo(f"{file}: --set storage.client_key=file:{file}")


def _read(file: Path, overrides: tuple[str, ...]) -> tuple["Job", list["Place"]]:
    from hotloop.core.job_file import load_job
    from hotloop.storage.places import find_places

    job = load_job(file, overrides)
    places = find_places(job)
    if not places:
        cause = "data.train, data.val and checkpoint.copy_to name nothing there: there is nothing to grant or to try"
        raise InputError(f"{file} uses no object storage", cause, "--set checkpoint.copy_to=s3://bucket/folder")
    return job, places


def _print(findings: list["Finding"]) -> None:
    from hotloop.cli.terminal import show

    place = ""
    for one in findings:
        if one.place != place:
            place = one.place
            show(click.style(place, bold=True))
        sign, colour = _SIGNS[one.state]
        show(f"  {click.style(sign, fg=colour)} {one.tried}: {one.text}")
        if one.fix:
            show(f"    fix: {one.fix}")
