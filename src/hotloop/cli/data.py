"""`hotloop data`."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hotloop.cli.ending import ended_by_signals
from hotloop.core.errors import InputError, cannot_write
from hotloop.core.files import write_atomic
from hotloop.core.units import count, escaped, format_bytes

if TYPE_CHECKING:
    from hotloop.data.check import Findings, Group

_SHOWN = 8
"""Files of each kind that are named on the screen."""
_MAX_PIXELS = click.option("--max-pixels", type=click.IntRange(1), default=100_000_000, show_default=True,
                           help="An image of more counts as damaged.")  # fmt: skip


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def data() -> None:
    """Look into data sets, and pack them."""


@data.command()
@click.argument("locations", nargs=-1, required=True, metavar="LOCATION...")
@click.option("--page", type=click.Path(dir_okay=False, path_type=Path), help="Write a page with pictures.")
@click.option("--workers", type=click.IntRange(0, 256), help="Processes that read.  [default: one a processor]")
@_MAX_PIXELS
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def check(locations: tuple[str, ...], page: Path | None, workers: int | None, max_pixels: int, as_json: bool) -> int:
    """Read every image once and say what is wrong.

    LOCATIONs are folders of class folders or lists, as a job names them; give training and validation data together,
    training first, and images that are in both are found, and classes that are not. Damaged files, equal files and
    contradicting labels, names that say another format, tiny and huge images, uneven classes; files in a folder that
    are not taken for images.

    Exits with 1 if something has to be mended: damage, contradicting labels, images in two data sets, or classes that
    the first one, which is trained, lacks.
    """
    from hotloop.cli.bar import Bar
    from hotloop.core.machine import read_machine
    from hotloop.data.check import check_images
    from hotloop.data.image_list import find_images

    _check_once(locations)
    sets = [find_images(location, key="", least=1 if number else 2) for number, location in enumerate(locations)]
    processes = read_machine().cpus if workers is None else workers
    if page and not page.parent.is_dir():
        raise InputError(f"no folder {page.parent}", "the page would be written there", f"mkdir -p {page.parent}")
    with Bar(sum(len(images) for images in sets)) as bar:
        findings = check_images(sets, processes, max_pixels, bar.advance)
    if page:
        from hotloop.pages.data import render_findings

        try:
            write_atomic(page, render_findings(findings, sets, max_pixels).encode(errors="backslashreplace"))
        except OSError as error:
            raise cannot_write(page, error, InputError, "--page FILE") from None
    if as_json:
        click.echo(json.dumps({**asdict(findings), "error": findings.is_error}))
    else:
        for line in _lines(findings):
            click.echo(escaped(line))
        if page:
            click.echo(f"page: {page}")
    return int(findings.is_error)


@data.command()
@click.argument("location")
@click.argument("to", type=click.Path(file_okay=False), metavar="FOLDER")
@click.option("--side", type=click.IntRange(1), help="Resize images whose shorter side is longer, as JPEG.")
@click.option("--quality", type=click.IntRange(1, 100), default=90, show_default=True, help="Of that JPEG.")
@click.option("--shard-mib", type=click.IntRange(1), default=256, show_default=True, help="Size of a shard.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the order.")
@click.option("--workers", type=click.IntRange(0, 256), help="Processes that read.  [default: one a processor]")
@_MAX_PIXELS
@click.option("--dry-run", is_flag=True, help="Say what would be packed, and write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def pack(
    location: str, to: str, side: int | None, quality: int, shard_mib: int, seed: int, workers: int | None,
    max_pixels: int, dry_run: bool, as_json: bool,
) -> int:  # fmt: skip
    """Write the images at LOCATION into tar shards in FOLDER.

    A few large files are read faster than a million small ones, from disks and from object storage alike. Every image
    is decoded once and left out if it is damaged; the order is drawn once. Each image has its class as a number (.cls),
    as WebDataset wants it, and by name (.json). Numbers count into the classes at LOCATION: they are the same for
    training and validation data if both have all classes.

    Exits with 1 if images were left out.
    """
    from hotloop.cli.bar import Bar
    from hotloop.core.machine import read_machine
    from hotloop.data.image_list import find_images
    from hotloop.data.object_store import is_remote
    from hotloop.data.pack import Packed, PackSettings, check_folder, pack_images

    if is_remote(to):
        why = "shards are written to a folder of this machine"
        raise InputError(f"{to} is in object storage", why, "name a folder here, and copy it: aws s3 sync")
    folder = Path(to)
    check_folder(folder)
    if folder.resolve().is_relative_to(Path(location).resolve()):
        why = "the shards would become a class of the images that they are made of"
        raise InputError(f"{folder} lies inside of {location}", why, "name a folder beside it")
    images = find_images(location, key="")
    if dry_run:
        size = sum(images.size_bytes(number) for number in range(len(images)))
        packed = Packed(images=len(images), size_bytes=size)
    else:
        settings = PackSettings(side or 0, quality, shard_mib * 2**20, seed, max_pixels)
        processes = read_machine().cpus if workers is None else workers
        with ended_by_signals(), Bar(len(images)) as bar:
            try:
                packed = pack_images(images, folder, settings, processes, bar.advance)
            except OSError as error:
                raise cannot_write(folder, error, InputError, "another FOLDER") from None
    if as_json:
        click.echo(json.dumps(asdict(packed)))
        return int(bool(packed.damaged))
    amount = f"{count(packed.images, 'image')}, {format_bytes(packed.size_bytes)}"
    if dry_run:
        click.echo(f"{amount} would be read and packed into {folder}")
        return 0
    click.echo(f"{amount} in {count(len(packed.shards), 'shard')}: {folder}")
    for line in _named("damaged, left out", [f"{one.path}: {one.reason}" for one in packed.damaged]):
        click.echo(escaped(line))
    return int(bool(packed.damaged))


def _check_once(locations: Sequence[str]) -> None:
    """Refuse data that are given twice, however they are spelled; places in object storage compare as paths do."""
    seen: dict[Path, str] = {}
    for location in locations:
        place = Path(location).resolve()
        if place in seen:
            spelled = "" if seen[place] == location else f", before as {seen[place]}"
            what = f"{location} is given twice{spelled}"
            raise InputError(what, "every image of it would have an equal one", "name it once")
        seen[place] = location


def _lines(findings: "Findings") -> Iterator[str]:
    """What was found, the worst first; the first files of each kind by name."""
    classes = ", ".join(
        f"{count(len(counts), 'class', 'classes')} in {location}" for location, counts in findings.classes.items()
    )
    yield f"{count(findings.images, 'image')}, {format_bytes(findings.size_bytes)}; {classes}"
    yield from _named("damaged", [f"{one.path}: {one.reason}" for one in findings.damaged])
    yield from _named(
        "equal files with contradicting labels",
        [f"{_equal(group)}: {' and '.join(group.labels)}" for group in findings.contradictions],
    )
    yield from _named("equal files in several data sets", [_equal(group) for group in findings.leaks])
    first = next(iter(findings.classes))
    for location, names in findings.untrained.items():
        yield from _named(f"classes of {location} without an image in {first}, which is trained", names)
    plain = [group for group in findings.duplicates if len(group.labels) == len(group.locations) == 1]
    yield from _named("equal files", [_equal(group) for group in plain])
    for title, found in (
        ("of another format than the name says", findings.wrong_suffix),
        ("turned by viewers, not by a training", findings.rotated),
        ("tiny", findings.tiny),
        ("huge", findings.huge),
    ):
        yield from _named(title, [f"{fault.path}: {fault.reason}" for fault in found])
    yield from _named("passed over: hidden, of another suffix, or in no class folder", findings.passed_over)
    for location, names in findings.unvalidated.items():
        yield from _named(f"classes of {first} without an image in {location}", names)
    for location, ratio in findings.uneven.items():
        yield f"uneven: the largest class of {location} has {ratio:.0f} times as many images as the smallest"
    if not findings.is_error:
        yield "nothing has to be mended"


def _equal(group: "Group") -> str:
    more = len(group.paths) - _SHOWN
    return " = ".join(group.paths[:_SHOWN]) + (f" = {more:,} more" if more > 0 else "")


def _named(title: str, texts: Sequence[str]) -> Iterator[str]:
    if texts:
        yield f"{title}: {len(texts):,}"
        yield from (f"  {text}" for text in texts[:_SHOWN])
        if len(texts) > _SHOWN:
            yield f"  and {len(texts) - _SHOWN:,} more; --json names them"
