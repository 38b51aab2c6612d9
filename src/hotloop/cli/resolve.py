"""`hotloop resolve`."""

import json
import platform
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from hotloop.core.errors import InputError

if TYPE_CHECKING:
    from hotloop.versions.table import Table


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--driver", default="", metavar="VERSION", help="Of NVIDIA's driver: 535.104.05.")
@click.option("--gpu", "gpus", multiple=True, metavar="NAME", help="A card: V100, RTX 4090; may be repeated.")
@click.option("--sm", "capabilities", multiple=True, metavar="N", help="A card's compute capability: 90; or 9.0.")
@click.option("--python", default="", metavar="VERSION", help="3.11; otherwise any, or this one on this machine.")
@click.option("--torch", default="", metavar="SPEC", help='Which torch is wanted: "2.11", ">=2.8".')
@click.option("--cuda", default="", metavar="VERSION", help="Which CUDA is wanted: 12, or 12.8.")
@click.option("--glibc", default="", metavar="VERSION", help="Of the C library: 2.31.")
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
    from hotloop.versions.solve import Impossible, Wish, solve
    from hotloop.versions.table import capability_of, current_table, has_arm, specifier_of, version_of

    table = _refreshed() if refresh else current_table()
    named = bool(driver or gpus or capabilities)
    here = {} if named else _this_machine()
    cards = {*map(table.capability, gpus), *map(capability_of, capabilities), *here.pop("cards", ())}
    given = {}
    for name, text in {"driver": driver, "python": python, "cuda": cuda, "glibc": glibc}.items():
        if text:
            version = version_of(text, f"--{name}", _EXAMPLES[name])
            given[name] = text
            if name == "python" and (version.major != 3 or len(version.release) < 2):
                raise InputError(
                    f"--python {text} is no version of Python 3", "3 and a number after it", "--python 3.12"
                )
    processor = {"processor": "aarch64"} if aarch64 or any(map(has_arm, gpus)) else {}
    wish = Wish(**{**here, **given, **processor, "cards": tuple(sorted(cards)), "torch": specifier_of(torch)})
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


_EXAMPLES = {"driver": "580.95.05", "python": "3.12", "cuda": "12.8", "glibc": "2.31"}
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


def _this_machine() -> dict[str, Any]:
    from hotloop.core.machine import read_machine
    from hotloop.versions.table import capability_of

    machine = read_machine()
    if not machine.driver:
        raise InputError(
            "there is no NVIDIA driver here",
            "nothing to resolve for is named",
            "hotloop resolve --driver 580 --gpu H100",
        )
    return {
        "driver": machine.driver,
        "cards": tuple(capability_of(gpu.capability) for gpu in machine.gpus if gpu.capability),
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "glibc": platform.libc_ver()[1],
        "processor": platform.machine(),
    }
