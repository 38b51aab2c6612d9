"""`hotloop data`."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hotloop.core.files import write_atomic
from hotloop.core.units import count, format_bytes

if TYPE_CHECKING:
    from hotloop.data.check import Findings

_SHOWN = 8
"""Files of each kind that are named on the screen."""


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def data() -> None:
    """Look into data sets."""


@data.command()
@click.argument("locations", nargs=-1, required=True, metavar="LOCATION...")
@click.option("--page", type=click.Path(dir_okay=False, path_type=Path), help="Write a page with pictures.")
@click.option("--workers", type=click.IntRange(0, 256), help="Processes that read.  [default: one a processor]")
@click.option("--max-pixels", type=click.IntRange(1), default=100_000_000, show_default=True,
              help="An image of more counts as damaged.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def check(locations: tuple[str, ...], page: Path | None, workers: int | None, max_pixels: int, as_json: bool) -> int:
    """Read every image once and say what is wrong.

    LOCATIONs are folders of class folders or lists, as a job names them; give training and validation data together,
    and images that are in both are found. Damaged files, equal files and contradicting labels, names that say another
    format, tiny and huge images, uneven classes.

    Exits with 1 if something has to be mended: damage, contradicting labels, or images in two data sets.
    """
    from hotloop.core.machine import read_machine
    from hotloop.data.check import check_images
    from hotloop.data.image_list import find_images

    sets = [find_images(location, key="") for location in locations]
    processes = read_machine().cpus if workers is None else workers
    with _Bar(sum(len(images) for images in sets)) as bar:
        findings = check_images(sets, processes, max_pixels, bar.advance)
    if page:
        from hotloop.pages.data import render_findings

        write_atomic(page, render_findings(findings, max_pixels))
    if as_json:
        click.echo(json.dumps({**asdict(findings), "error": findings.is_error}))
    else:
        for line in _lines(findings):
            click.echo(line)
        if page:
            click.echo(f"page: {page}")
    return int(findings.is_error)


class _Bar:
    """How far the check is, on a terminal."""

    def __init__(self, images: int) -> None:
        from rich.console import Console
        from rich.progress import Progress

        console = Console(stderr=True)
        self._progress = Progress(console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task("reading", total=images)

    def __enter__(self) -> "_Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def advance(self, images: int) -> None:
        self._progress.advance(self._task, images)


def _lines(findings: "Findings") -> Iterator[str]:
    """What was found, the worst first; the first files of each kind by name."""
    classes = ", ".join(
        f"{count(len(counts), 'class', 'classes')} in {location}" for location, counts in findings.classes.items()
    )
    yield f"{count(findings.images, 'image')}, {format_bytes(findings.size_bytes)}; {classes}"
    yield from _named("damaged", [f"{one.path}: {one.reason}" for one in findings.damaged])
    yield from _named(
        "equal files with contradicting labels",
        [f"{' = '.join(group.paths)}: {' and '.join(group.labels)}" for group in findings.contradictions],
    )
    yield from _named("equal files in several data sets", [" = ".join(group.paths) for group in findings.leaks])
    serious = [*findings.contradictions, *findings.leaks]
    same = [" = ".join(group.paths) for group in findings.duplicates if group not in serious]
    yield from _named("equal files", same)
    for title, found in (
        ("of another format than the name says", findings.wrong_suffix),
        ("tiny", findings.tiny),
        ("huge", findings.huge),
    ):
        yield from _named(title, [f"{odd.path}: {odd.reason}" for odd in found])
    for location, ratio in findings.uneven.items():
        yield f"uneven: the largest class of {location} has {ratio:.0f} times as many images as the smallest"
    if not findings.is_error:
        yield "nothing has to be mended"


def _named(title: str, texts: Sequence[str]) -> Iterator[str]:
    if texts:
        yield f"{title}: {len(texts):,}"
        yield from (f"  {text}" for text in texts[:_SHOWN])
        if len(texts) > _SHOWN:
            yield f"  and {len(texts) - _SHOWN:,} more; --json or --page names them"
