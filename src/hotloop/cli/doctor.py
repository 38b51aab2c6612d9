"""`hotloop doctor`."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hotloop.cli.terminal import show
from hotloop.core.errors import InputError

if TYPE_CHECKING:
    from hotloop.doctor.finding import Finding
    from hotloop.doctor.record import MachineRecord

_NO_FOLDER = ("No such file or directory", "Not a directory")
_SIGNS = {
    "error": ("✗", "red"),
    "warning": ("!", "yellow"),
    "note": ("·", "cyan"),
    "": ("✓", "green"),
    "unknown": ("?", "yellow"),
}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--deep", is_flag=True, help="Also try and time the GPUs, links and disks: up to a minute a GPU.")
@click.option("--data", multiple=True, type=click.Path(path_type=Path), metavar="FOLDER",
              help="Also look at a folder with data, and read of it for 1.5 s; may be repeated.")  # fmt: skip
@click.option("--machine", type=click.Path(path_type=Path), metavar="FILE", help="Examine a machine that was saved.")
@click.option("--save", type=click.Path(path_type=Path), metavar="FILE", help="Write what was read, for --machine.")
@click.option("-v", "--verbose", is_flag=True, help="Show why each finding matters, and all that was measured.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(
    deep: bool, data: tuple[Path, ...], machine: Path | None, save: Path | None, verbose: bool, as_json: bool
) -> int:
    """Say what is wrong with this machine, and what to type.

    Nothing is changed. The exit code is 1 if there is an error among the findings.
    """
    from hotloop.doctor.examine import examine
    from hotloop.doctor.record import load_record

    if machine and (deep or data):
        option = "--deep" if deep else "--data"
        raise InputError(f"{option} needs the machine itself", "--machine names a record", f"leave {option} out")
    record = load_record(machine) if machine else _read(data, deep=deep)
    findings = examine(record)
    if as_json:
        click.echo(json.dumps({"findings": [asdict(one) for one in findings], "machine": record.model_dump()}))
    else:
        show("\n".join(_page(record, findings, verbose=verbose)))
    if save:
        _save(record, save)
    return int(any(one.level == "error" for one in findings))


def _read(data: Sequence[Path], *, deep: bool) -> "MachineRecord":
    from hotloop.doctor.deep import probe
    from hotloop.doctor.read import read_record

    record = read_record(data, rates=bool(data))
    for folder in record.folders:
        if folder.role == "data" and folder.error in _NO_FOLDER:
            raise InputError(f"--data {folder.path} is no folder", folder.error, "hotloop doctor --data FOLDER")
    return probe(record, lambda line: click.echo(f"trying {line}", err=True)) if deep else record


def _save(record: "MachineRecord", path: Path) -> None:
    from hotloop.core.errors import cannot_write
    from hotloop.core.files import write_atomic

    try:
        write_atomic(path, record.model_dump_json(indent=1) + "\n")
    except OSError as error:
        raise cannot_write(path, error, InputError) from None


def _page(record: "MachineRecord", findings: Sequence["Finding"], *, verbose: bool) -> list[str]:
    """Groups with a sign each; what was found below them."""
    from hotloop.doctor.examine import READERS
    from hotloop.doctor.finding import GROUPS, LEVELS, catalogue
    from hotloop.doctor.summary import summary

    by_group = {group: list(found) for group, found in groupby(findings, lambda one: one.group)}
    told = summary(record)
    lines = []
    for group, name in GROUPS.items():
        found = by_group.get(group, [])
        if group == "probes" and not record.rates:
            continue
        worst = min((one.level for one in found), key=LEVELS.index, default="")
        shown = "" if worst == "note" else worst
        if not shown and READERS.get(group, set()) & set(record.unread):
            shown = "unknown"
        lines.append(f"{_sign(shown)} {click.style(name, bold=True)}  {told.get(group, '')}".rstrip())
        if verbose and group == "probes":
            lines += [f"    {line}" for line in told["rates"].splitlines()]
        for one in found:
            lines.append(f"  {_sign(one.level)} {one.title} [{one.id}]")
            lines.append(f"      {one.evidence}")
            if verbose:
                lines.append(f"      {catalogue()[one.id].why}")
            lines.append(f"      {click.style('fix:', bold=True)} {one.fix}")
    counts = [(sum(one.level == level for one in findings), level) for level in LEVELS]
    spoken = [f"{count} {level}{'s' * (count != 1)}" for count, level in counts if count]
    return [*lines, "", ", ".join(spoken) or "nothing found"]


def _sign(level: str) -> str:
    sign, colour = _SIGNS[level]
    return click.style(sign, fg=colour, bold=True)
