"""`hotloop explain`."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import click

from hotloop.cli.terminal import show
from hotloop.core.errors import InputError

if TYPE_CHECKING:
    from hotloop.explain.lines import Line
    from hotloop.explain.report import Explained
    from hotloop.explain.scan import Scan

_SHOWN_CHARACTERS = 300
_FIX = "hotloop explain LOG"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("logs", nargs=-1, metavar="[FILE|-]...")
@click.option("--machine", metavar="FILE", type=click.Path(path_type=Path),
              help="Join it with a machine that hotloop doctor saved, instead of this one.")  # fmt: skip
@click.option("--no-machine", is_flag=True, help="Join it with no machine: the log is from elsewhere.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def explain(logs: tuple[str, ...], machine: Path | None, no_machine: bool, as_json: bool) -> None:
    """Say what ended a run, from its log, and what to type.

    The first cause is looked for, not the last line; logs of several ranks may be mixed. Reads standard input without
    FILE. Several files are the dumps of torch's flight recorder, one of each rank.
    """
    from hotloop.doctor.read import read_record
    from hotloop.doctor.record import load_record
    from hotloop.explain.decide import decide
    from hotloop.explain.flight import compared, is_dump, read_dump
    from hotloop.explain.report import explained

    if machine and no_machine:
        raise InputError("--machine and --no-machine exclude each other", "one names a machine", _FIX)
    saved = load_record(machine) if machine else None
    if any(is_dump(Path(one)) for one in logs):
        dumps = [read_dump(Path(one)) for one in logs]
        if len({dump.rank for dump in dumps}) < len(dumps):
            raise InputError("two dumps are of one rank", "the number in a file's name tells the rank", _FIX)
        told, size = compared(dumps), {"dumps": len(logs)}
    elif len(logs) > 1:
        raise InputError(f"{len(logs)} logs were named", "one is read at a time", "cat LOGS | hotloop explain")
    else:
        seen = _scanned(logs[0] if logs else "-")
        told = explained(decide(seen), None if no_machine else lambda: saved or read_record())
        size = {"lines": seen.lines, "bytes": seen.size}
    if as_json:
        causes = [{**asdict(one), "evidence": [_evidence(line) for line in one.evidence]} for one in told]
        click.echo(json.dumps({"causes": causes, **size}))
    else:
        show("\n".join(_page(told, size)))


def _scanned(log: str) -> "Scan":
    from hotloop.explain.scan import NotText, scan

    with _opened(log) as file:
        try:
            seen = scan(file)
        except NotText:
            raise InputError(f"{_name(log)} is no text", "it holds bytes of another kind", _FIX) from None
    if not seen.size:
        raise InputError(f"{_name(log)} is empty", "there is nothing to explain", _FIX)
    return seen


@contextmanager
def _opened(log: str) -> Iterator[BinaryIO]:
    if log == "-":
        if sys.stdin.isatty():
            raise InputError("no log was named", "standard input is a terminal", _FIX)
        yield sys.stdin.buffer
        return
    try:
        with open(log, "rb") as file:
            yield file
    except OSError as error:
        raise InputError(f"cannot read {log}", error.strerror or str(error), _FIX) from None


def _name(log: str) -> str:
    return "standard input" if log == "-" else log


def _page(told: Sequence["Explained"], size: Mapping[str, int]) -> list[str]:
    if not told:
        what, number = next(iter(size.items()))
        return [f"no cause of a failure in {number:,} {what}"]
    first = told[0]
    page = [f"{click.style(first.title, bold=True)} [{first.id}] ({first.area}, confidence {first.confidence:.2f})"]
    page += [f"  {_where(line)}: {_short(line.text)}" for line in first.evidence]
    page += [f"  {note}" for note in first.notes]
    page += [f"  this machine: {said}" for said in first.machine]
    page += [f"  {first.why}", f"  {click.style('fix:', bold=True)} {first.fix}"]
    for other in told[1:4]:
        where = f", {_where(other.evidence[0])}" if other.evidence else f": {other.notes[0]}"
        page.append(f"also: {other.title} [{other.id}]{where}")
    return page


def _evidence(line: "Line") -> dict[str, int | str]:
    part = {"message_line": line.part} if line.part else {}
    return {"line": line.number, **part, "text": line.text}


def _where(line: "Line") -> str:
    return f"line {line.number}, line {line.part} of its message" if line.part else f"line {line.number}"


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]} ..."
