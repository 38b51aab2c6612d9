"""Images in tar files, WebDataset's shards: `key.jpg` with its class as "label" in `key.json`, or in `key.cls`.

A shard is read from its first to its last header once; after that each image is found by its place, so that any order
and an exact resumption cost nothing.
"""

import json
import math
import os
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, product, zip_longest
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from hotloop.core.errors import InputError
from hotloop.core.files import state_of
from hotloop.core.units import count
from hotloop.data.columns import Column, Texts
from hotloop.data.listing import Listing, Spans, label_column

_KINDS = (".tar", ".parquet")
_MOST_SHARDS = 100_000
_MOST_DIGITS = 100
"""Of a number of a class."""
_Member = tuple[str, tuple[str, str], int, int]
"""An image: its name, its class and who told it, offset and size."""

_PART = re.compile(r"(.+)-(\d+)-of-(\d+)(\.\w+)$")
_RANGE = re.compile(r"\{(\d{1,18})\.\.(\d{1,18})\}")


def shards_of(location: str) -> tuple[str, list[str]] | None:
    """The folder and the names of the shards that a location means: a .tar or .parquet file, `train-{000..031}.tar`, or
    a folder that holds files of one of these kinds and no folders. None if it means no shards.

    Raises:
        InputError: they are compressed or of both kinds, or one of them is not there.
    """
    path = Path(location)
    if location.endswith((".tar.gz", ".tgz", ".tar.zst", ".tar.xz", ".tar.bz2")):
        cause = "an image in the middle of a compressed file cannot be reached"
        raise InputError(f"{location} is compressed", cause, "unpack it to a .tar: JPEG gains nothing by it")
    if path.is_dir():
        entries = [entry for entry in os.scandir(path) if not entry.name.startswith(".")]
        names = sorted(entry.name for entry in entries if entry.name.endswith(_KINDS) and not entry.is_dir())
        if not names or any(entry.is_dir() for entry in entries):
            return None
        if len({Path(name).suffix for name in names}) > 1:
            cause = "they may hold the same images"
            raise InputError(f"{location} holds .tar and .parquet files", cause, "keep those to train on in one folder")
        if absent := [path / name for name in names if not (path / name).is_file()]:
            cause = "it is a link that leads nowhere, or a pipe: its images would be missing"
            raise InputError(f"{absent[0]} is no file", cause, f"mount what it leads to, or: rm {absent[0]}")
        _check_parts(location, names)
        return location, names
    if path.suffix not in _KINDS:
        return None
    names = expanded(path.name)
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        what = f"no shard {path.parent / missing[0]}"
        cause = f"{location} means {count(len(names), 'file')}, of which {len(missing):,} cannot be found"
        raise InputError(what, cause, "name those there")
    return str(path.parent), names


def _check_parts(location: str, names: Sequence[str]) -> None:
    """Refuse a folder with files of several sets: train-00000-of-00002.parquet and test-00000-of-00001.parquet."""
    parts = [match for name in names if (match := _PART.match(name))]
    sets = sorted({match[1] for match in parts})
    if len(sets) > 1:
        name, number, count, suffix = parts[0].groups()
        one = f"{location}/{name}-{{{0:0{len(number)}}..{int(count) - 1:0{len(number)}}}}-of-{count}{suffix}"
        what = f"{location} holds files of {', '.join(sets)}"
        raise InputError(what, "all of them would be one data set", f"name one of them: {one}")


def expanded(name: str) -> list[str]:
    """`a-{08..10}.tar` as a-08.tar, a-09.tar, a-10.tar; of several ranges each with each.

    Raises:
        InputError: a range is none, or they mean too many.
    """
    texts, firsts, lasts = (_RANGE.split(name)[start::3] for start in range(3))
    ranges = [range(int(first), int(last) + 1) for first, last in zip(firsts, lasts, strict=True)]
    number = math.prod(map(len, ranges))
    if not 0 < number <= _MOST_SHARDS:
        raise InputError(f"{name} means {number:,} shards", f"1 to {_MOST_SHARDS:,} can be", "name those there")
    found = []
    for numbers in product(*ranges):
        written = [f"{each:0{len(first)}d}" for each, first in zip(numbers, firsts, strict=True)]
        found.append("".join(chain.from_iterable(zip_longest(texts, written, fillvalue=""))))
    return found


def scan_shards(
    base: str, names: Sequence[str], suffixes: frozenset[str], open_shard: Callable[[str], BinaryIO],
    watched: Mapping[str, str],
    map_names: Callable[[Callable[[str], list[_Member]], Sequence[str]], Iterable[list[_Member]]] = map,
) -> Listing:  # fmt: skip
    """What shards hold, in their order. About 30 µs a file in them.

    Classes that are numbers in .cls files are in the order of their value, names in that of folders.

    Args:
        base: what names are relative to, for errors.
        open_shard: called with a name.
        watched: what the listing depends on.
        map_names: looks through several at once.

    Raises:
        InputError: a shard is no tar file or ends early, or an image has no class.
    """
    images: list[str] = []
    labels: list[str] = []
    told_by: set[str] = set()
    places: list[tuple[int, int, int]] = []
    for number, found in enumerate(map_names(lambda name: _images(base, name, suffixes, open_shard), names)):
        for image, (label, suffix), offset, size in found:
            images.append(f"{names[number]}/{image}")
            labels.append(label)
            told_by.add(suffix)
            places.append((number, offset, size))
    numbered = told_by == {"cls"} and all(label.isdecimal() and len(label) < _MOST_DIGITS for label in set(labels))
    classes = sorted(set(labels), key=(lambda label: (int(label), label)) if numbered else None)
    spans = Spans(Column(np.array(places, np.int64).reshape(-1, 3)), tuple(names))
    return Listing(Texts.of(images), label_column(labels, classes), tuple(classes), watched, spans)


def states_of(base: str, names: Sequence[str], watch_base: bool) -> dict[str, str]:
    """The state of shards on a disk, and of the folder where others in it would belong to them."""
    paths = [*([base] if watch_base else []), *(os.path.join(base, name) for name in names)]
    return {os.path.abspath(path): state_of(path) for path in paths}


def _images(base: str, name: str, suffixes: frozenset[str], open_shard: Callable[[str], BinaryIO]) -> list[_Member]:
    """The images of a shard."""
    path = os.path.join(base, name)
    members: dict[str, dict[str, tarfile.TarInfo]] = {}
    try:
        with open_shard(name) as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for member in _members(tar, path, file):
                folder, _, last = member.name.rpartition("/")
                if last.startswith("."):  # macOS puts ._1.jpg beside 1.jpg
                    continue
                stem, _, suffix = last.partition(".")
                parts = members.setdefault(f"{folder}/{stem}", {})
                if suffix.lower() in parts:
                    raise InputError(
                        f"{path} holds {member.name} twice", "one would take the other's place", "write it again"
                    )
                parts[suffix.lower()] = member
            for parts in members.values():
                _check_named(path, parts, suffixes)
            return [
                (member.name, _label(tar, path, member, parts), member.offset_data, member.size)
                for parts in members.values()
                for suffix, member in parts.items()
                if f".{suffix}" in suffixes
            ]
    except (tarfile.TarError, EOFError, OSError) as error:
        raise _unreadable(path, str(error) or "it ends early") from None


def _check_named(path: str, parts: dict[str, tarfile.TarInfo], suffixes: frozenset[str]) -> None:
    """Refuse a sample whose only images would be passed over, as all after the first dot tells what a file is."""
    if any(f".{suffix}" in suffixes for suffix in parts):
        return
    for suffix, member in parts.items():
        if os.path.splitext(suffix)[1] in suffixes:
            raise InputError(
                f"{path}: {member.name} is not taken for an image",
                f'in shards all after the first dot tells what a file is: "{suffix}"',
                "write the shard with names that have one dot: hotloop data pack makes such ones of a folder",
            )


def _unreadable(path: str, cause: str) -> InputError:
    return InputError(f"{path} cannot be read", cause, "fetch or write it again, or see who may read it: ls -l")


def _members(tar: tarfile.TarFile, path: str, file: BinaryIO) -> Iterator[tarfile.TarInfo]:
    """The files in a shard, up to its end; Python's own iteration takes a damaged header for the end."""
    for member in tar:
        if member.size < 0:  # its iteration would not end
            raise _unreadable(path, f"{member.name} has a size below 0")
        if member.islnk() or member.issym() or member.issparse():
            what = f"{path}: {member.name} is a link or has holes"
            raise InputError(what, "its bytes lie elsewhere", "write the shard without: tar --hard-dereference -h")
        if member.isfile():
            yield member
    file.seek(tar.offset)
    rest = file.read(tarfile.RECORDSIZE)
    if rest[: tarfile.BLOCKSIZE] != bytes(tarfile.BLOCKSIZE):
        raise _unreadable(path, f"at byte {tar.offset:,} is neither a file's header nor the end")
    if any(rest):  # the files of the second one would be passed over without a word
        what = f"{path} goes on after its end at byte {tar.offset:,}"
        cause = "several tar files, one behind the other, are read up to the end of the first"
        raise InputError(what, cause, "name them one by one, or join them: tar -A -f FIRST.tar SECOND.tar")


def _label(
    tar: tarfile.TarFile, path: str, image: tarfile.TarInfo, parts: dict[str, tarfile.TarInfo]
) -> tuple[str, str]:
    """The class, and the suffix of the file that tells it."""
    for suffix in ("json", "cls"):
        if suffix in parts:
            file = tar.extractfile(parts[suffix])
            assert file is not None
            label = _text(file.read(), suffix)
            if label:
                return label, suffix
    stem = image.name.rpartition("/")[2].partition(".")[0]
    what = f"{path}: {image.name} has no class"
    raise InputError(what, "it is read from a .cls or .json file of the same name", f"add {stem}.cls to the shard")


def _text(content: bytes, suffix: str) -> str:
    """The class in a .cls or .json file; empty if there is none."""
    try:
        if suffix == "cls":
            return content.decode().strip()
        found: Any = json.loads(content)
        label = found.get("label") if isinstance(found, dict) else found
        return str(label) if isinstance(label, str | int) else ""
    except (ValueError, RecursionError):
        return ""
