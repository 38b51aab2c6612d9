"""`hotloop image`: check, sbom, verify, outdated and advisories."""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hotloop.cli.image_engine import engine_option, run_settings
from hotloop.core.errors import HotloopError, InputError

if TYPE_CHECKING:
    from hotloop.image.check import Finding
    from hotloop.image.engines import Engine
    from hotloop.image.lock import Locked

_SIGNS = {"error": "✗", "warning": "!", "note": "·"}
_LISTED = (
    "import json, importlib.metadata as m; print(json.dumps(sorted({(d.name, d.version) for d in m.distributions()})))"
)
"""What is installed, said by the image's own Python."""
_NOT_STARTED = 125
"""Exit code of docker and podman that have started nothing: there is no such image, or no such GPU."""
_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@click.command()
@click.argument("subject", metavar="FILE|TAG")
@click.option("--driver", default="", metavar="VERSION", help="The oldest of the machines that it is for: 535.104.05.")
@engine_option
@_json
def check(subject: str, driver: str, engine: "Engine | None", as_json: bool) -> int:
    """Say what is wrong with a Dockerfile, or with an image.

    By hadolint's rules, which read files only, and by our own: versions that are not pinned, root, CUDA twice, secrets,
    CUDA of the base against torch's. With --driver whether torch runs on those machines. The exit code is 1 if there is
    an error among the findings.
    """
    from hotloop.image.check import check as check_rules
    from hotloop.image.check import hadolint, of_dockerfile, of_image, together
    from hotloop.image.engines import find_engine, inspect
    from hotloop.image.instructions import read_instructions
    from hotloop.versions.table import current_table, version_of

    table = current_table()
    if driver:
        version_of(driver, "--driver", "580.95.05")
    if _is_file(subject):
        file = Path(subject)
        instructions = read_instructions(file)
        found = together(check_rules(of_dockerfile(instructions, table), table, driver), hadolint(file))
    else:
        found = list(check_rules(of_image(inspect(find_engine(engine), subject)), table, driver))
    _show(found, as_json=as_json)
    return int(any(one.level == "error" for one in found))


@click.command()
@click.argument("subject", metavar="LOCK|TAG")
@click.option("--timestamp", type=click.IntRange(0), envvar="SOURCE_DATE_EPOCH", metavar="SECONDS",
              help="Since 1970, of the list itself.  [default: SOURCE_DATE_EPOCH, or now]")  # fmt: skip
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write it there.")
@engine_option
def sbom(subject: str, timestamp: int | None, output: Path | None, engine: "Engine | None") -> int:
    """List what is in an image, as CycloneDX.

    Of the Python packages of a lock file, or of those that are installed in an image. Packages of the distribution are
    not listed.
    """
    from hotloop.core.errors import cannot_write
    from hotloop.core.files import write_atomic
    from hotloop.image.sbom import sbom as make_sbom

    packages = _packages(subject, engine)
    name, _, version = Path(subject).name.partition(":")
    content = make_sbom(name, version, packages, int(time.time()) if timestamp is None else timestamp)
    text = json.dumps(content, indent=1) + "\n"
    if not output:
        click.echo(text, nl=False)
        return 0
    try:
        write_atomic(output, text)
    except OSError as error:
        raise cannot_write(output, error, InputError) from None
    click.echo(f"{len(packages)} packages in {output}")
    return 0


@click.command()
@click.argument("tag")
@click.option("--gpus", default="", metavar="all|none|0,1", help="[default: all, if there are any here]")
@engine_option
@_json
def verify(tag: str, gpus: str, engine: "Engine | None", as_json: bool) -> int:
    """Run the doctor inside an image, on this machine.

    The exit code is 1 if it finds an error.
    """
    from hotloop.image.engines import find_engine, first_said, output_of

    settings = run_settings(gpus=gpus)
    code, said, complained = output_of(find_engine(engine), tag, ["hotloop", "doctor", "--json"], settings)
    try:
        found = json.loads(said)
    except json.JSONDecodeError:
        fix = f"hotloop image run {tag} -- hotloop doctor"
        kind = InputError if code == _NOT_STARTED else HotloopError
        raise kind(f"the doctor did not run in {tag}: exit code {code}", first_said(complained), fix) from None
    if as_json:
        click.echo(json.dumps(found))
    else:
        for one in found["findings"]:
            click.echo(
                f"{_SIGNS[one['level']]} {one['title']} [{one['id']}]\n    {one['evidence']}\n    fix: {one['fix']}"
            )
        click.echo(_counted([one["level"] for one in found["findings"]]))
    return int(any(one["level"] == "error" for one in found["findings"]))


@click.command()
@click.argument("subject", metavar="LOCK|TAG")
@click.option("--advisories", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Known vulnerabilities.  [default: what hotloop image advisories has fetched]")  # fmt: skip
@click.option("--index", is_flag=True, help="Ask pip's index for newer patches of every package: a second each.")
@click.option("--most-days", type=click.IntRange(1), default=30, show_default=True, help="An image may be this old.")
@engine_option
@_json
def outdated(
    subject: str, advisories: Path | None, index: bool, most_days: int, engine: "Engine | None", as_json: bool
) -> int:
    """Say what has a newer patch or a known vulnerability, and whether rebuilding is due.

    It is due for a vulnerability that is fixed in a later version, for a newer patch of torch, and for an image that is
    older than --most-days, because the distribution's fixes come with rebuilding only. Then the exit code is 1.
    """
    from hotloop.image import outdated as rules
    from hotloop.image.advisories import affecting, database
    from hotloop.versions.table import current_table

    packages = _packages(subject, engine)
    file = advisories or database()
    known = affecting(packages, file) if file and (advisories or file.exists()) else None
    if known is None:
        click.echo("note: no advisories are here; hotloop image advisories fetches them", err=True)
    newer = rules.newer_patches(packages, current_table(), rules.index_versions if index else None)
    found = rules.plan(newer, known or (), _age_days(subject, engine), most_days)
    if as_json:
        content = {"due": found.due, "reasons": found.reasons, "newer": [asdict(one) for one in found.newer]}
        click.echo(json.dumps({**content, "advisories": None if known is None else [asdict(one) for one in known]}))
        return int(found.due)
    for one in found.newer:
        click.echo(f"{one.package} {one.version}: {one.newest} is there")
    for each in found.advisories:
        fixed = f"fixed in {each.fixed}" if each.fixed else "not fixed in any version"
        click.echo(f"{each.package} {each.version}: {each.id}, {fixed}: {each.summary}")
    well = "nothing is due" if known is not None else "nothing is due, but vulnerabilities were not looked for"
    click.echo("\n".join(["rebuild:", *(f"  {reason}" for reason in found.reasons)]) if found.due else well)
    return int(found.due)


@click.command()
@click.option("--source", default="", metavar="ADDRESS|FILE", help="[default: OSV's own export for Python packages]")
def advisories(source: str) -> int:
    """Fetch known vulnerabilities of Python packages, for `outdated`.

    They are kept in the user's cache; nothing is sent but the request for the whole file.
    """
    from hotloop.image.advisories import SOURCE, database, refresh

    file = database()
    if file is None:
        raise InputError(
            "there is no place for advisories", "this user has no home", "XDG_CACHE_HOME=FOLDER hotloop ..."
        )
    count = refresh(source or SOURCE, file)
    click.echo(f"{count} advisories in {file}")
    return 0


def _is_file(subject: str) -> bool:
    """A path, or the tag of an image."""
    looks = subject.endswith(("Dockerfile", "Containerfile", ".lock", ".txt")) or subject.startswith((".", "/"))
    return Path(subject).exists() or looks


def _packages(subject: str, engine: "Engine | None") -> Sequence["Locked"]:
    from hotloop.image.engines import RunSettings, find_engine, first_said, output_of
    from hotloop.image.lock import Locked, read_lock

    if _is_file(subject):
        return read_lock(Path(subject))
    found = find_engine(engine)
    code, said, complained = output_of(found, subject, ["python3", "-c", _LISTED], RunSettings())
    if code:
        kind = InputError if code == _NOT_STARTED else HotloopError
        fix = f"{found} images lists what is here"
        raise kind(f"what is installed in {subject} cannot be read", first_said(complained), fix)
    return tuple(Locked(name, version, ()) for name, version in json.loads(said))


def _age_days(subject: str, engine: "Engine | None") -> float | None:
    """Of an image, or of a lock file since it was written."""
    from hotloop.image.engines import find_engine, inspect

    now = time.time()
    if _is_file(subject):
        return (now - os.stat(subject).st_mtime) / 86400
    config: dict[str, Any] = inspect(find_engine(engine), subject)
    created = (config.get("Labels") or {}).get("org.opencontainers.image.created") or config["created"]
    return (now - datetime.fromisoformat(created).timestamp()) / 86400 if created else None


def _show(found: Sequence["Finding"], *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"findings": [asdict(one) for one in found]}))
        return
    for one in found:
        where = f"line {one.line}: " if one.line else ""
        click.echo(
            f"{_SIGNS[one.level]} {where}{one.evidence} [{one.id}]" + (f"\n    fix: {one.fix}" if one.fix else "")
        )
    click.echo(_counted([one.level for one in found]))


def _counted(levels: Sequence[str]) -> str:
    counts = [(levels.count(level), level) for level in _SIGNS]
    return ", ".join(f"{count} {level}{'s' * (count != 1)}" for count, level in counts if count) or "nothing found"


COMMANDS: tuple[click.Command, ...] = (check, sbom, verify, outdated, advisories)
