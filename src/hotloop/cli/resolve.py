"""`hotloop resolve`."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from hotloop.cli.wishes import read_wish, typed, wish_options

if TYPE_CHECKING:
    from hotloop.versions.table import Table


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@wish_options(python="any, or this one on this machine")
@click.option("--glibc", default="", callback=typed, metavar="VERSION", help="Of the C library: 2.31.")
@click.option("--aarch64", is_flag=True, help="For 64-bit Arm processors; GH200, GB200 and Jetsons have one anyway.")
@click.option("--refresh", is_flag=True, help="First take up versions that are newer than the table, from pip's index.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def resolve(
    driver: str, gpus: tuple[str, ...], capabilities: tuple[str, ...], python: str, torch: str, cuda: str, glibc: str,
    aarch64: bool, refresh: bool, as_json: bool,
) -> int:  # fmt: skip
    """Say which torch runs with a driver, a card and a Python.

    And what to type for it. Of this machine, unless a driver or a card is named. The exit code is 1 if nothing does;
    then it says why, and what would have to be different.
    """
    from hotloop.versions.solve import Impossible, solve
    from hotloop.versions.table import current_table

    table = _refreshed() if refresh else current_table()
    given = {"driver": driver, "python": python, "cuda": cuda, "glibc": glibc}
    example = "hotloop resolve --driver 580 --gpu H100"
    wish = read_wish(table, gpus, capabilities, given, torch, aarch64=aarch64, example=example)
    found = solve(wish, table)
    if isinstance(found, Impossible):
        changes = [{"change": one.text, "install": one.solution.install} for one in found.changes]
        content: dict[str, Any] = {"impossible": found.reasons, "changes": changes}
        would = ["what would:", *(f"  {one['change']}\n    {one['install']}" for one in changes)] if changes else []
        text = "\n".join(["nothing fits:", *(f"  {reason}" for reason in found.reasons), *would])
    else:
        content = _solution(asdict(found.build), found.verdict, found.install, found.notes, wish.python)
        lines = [found.install, *(f"{name}: {value}" for name, value in content.items() if name in _SHOWN and value)]
        text = "\n".join([*lines, *(f"note: {note}" for note in found.notes)])
    click.echo(json.dumps({**content, "table_date": table.date}) if as_json else text)
    return int(isinstance(found, Impossible))


def _refreshed() -> "Table":
    from hotloop.core.files import write_atomic
    from hotloop.versions.refresh import refresh, written
    from hotloop.versions.table import current_table, refreshed_file

    table = refresh(current_table(), lambda line: click.echo(line, err=True))
    if file := refreshed_file():
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(file, written(table))
        except OSError as error:
            click.echo(f"warning: the new table is not kept: {error}", err=True)
    return table


_SHOWN = ("torch", "cuda", "cudnn", "nccl", "python", "driver_verdict")


def _solution(build: dict[str, Any], verdict: str, install: str, notes: tuple[str, ...], python: str) -> dict[str, Any]:
    first, last = build["pythons"]
    names = ("torch", "torchvision", "cuda", "cudnn", "nccl", "triton", "glibc", "processor", "source")
    return {
        **{name: build[name] for name in names},
        "python": python or f"3.{first} to 3.{last}",
        "install": install,
        "driver_verdict": verdict,
        "notes": notes,
    }
