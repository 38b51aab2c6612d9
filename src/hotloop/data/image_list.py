"""Images in files and their classes: class folders, lists and shards."""

import codecs
import csv
import io
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path

import numpy as np

from hotloop.core.errors import DamagedSample, InputError
from hotloop.core.files import state_of
from hotloop.core.units import count
from hotloop.data.columns import Column, Texts
from hotloop.data.decode import read_file
from hotloop.data.index import indexed
from hotloop.data.listing import Listing, Spans, label_column
from hotloop.data.object_store import SCHEMES, is_remote
from hotloop.data.parquet import SUFFIX as PARQUET
from hotloop.data.parquet import require_pyarrow
from hotloop.data.parquet_list import scan_parquet
from hotloop.data.remote import Remote
from hotloop.data.remote_list import find_remote
from hotloop.data.shards import scan_shards, shards_of, states_of
from hotloop.data.stages import READING

SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}
)


@dataclass(frozen=True)
class ImageList:
    """Files with their class.

    Attributes:
        names: of the files, relative to `base` unless they are absolute.
        labels: counting into `classes`.
        origin: the folder, list or shards that they were found in.
        spans: where they lie in shards; None if each is a file.
        remote: where they are fetched from, if `base` is in object storage.
        sizes: bytes of each object there, int64.
    """

    names: Texts
    labels: Column
    classes: tuple[str, ...]
    base: str
    origin: str
    spans: Spans | None = None
    remote: Remote | None = None
    sizes: Column | None = None

    def __len__(self) -> int:
        return len(self.names)

    def path(self, number: int) -> str:
        return os.path.join(self.base, self.names[number])

    def label(self, number: int) -> int:
        return int(self.labels.array[number])

    def read(self, number: int) -> bytes:
        """An image's bytes.

        Raises:
            DamagedSample: they cannot be read, or there are none.
        """
        with READING.added():
            if self.remote:
                return self._fetched(self.remote, number)
            if self.spans:
                return self.spans.read(number, self.base, self.path(number))
            return read_file(self.path(number))

    def _fetched(self, remote: Remote, number: int) -> bytes:
        try:
            content = remote.read(*self.spans.place(number)) if self.spans else remote.read(self.names[number])
        except FileNotFoundError:
            raise DamagedSample(self.path(number), "there is no such object") from None
        except EOFError:
            raise DamagedSample(self.path(number), "the shard ends before the image does") from None
        if not content:
            raise DamagedSample(self.path(number), "the object is empty")
        return content

    def size_bytes(self, number: int) -> int:
        """Of an image as it is stored, in Parquet files about; 0 if it is not there."""
        if self.sizes:
            return int(self.sizes.array[number])
        if self.spans:
            return self.spans.size_bytes(number, self.base)
        try:
            return os.stat(self.path(number)).st_size
        except OSError:
            return 0

    def most_bytes(self) -> int:
        """No image has more."""
        if self.spans:
            return self.spans.most_bytes(self.base)
        return max((self.size_bytes(number) for number in range(len(self))), default=0)

    def fingerprint(self) -> str:
        """Hash over classes, labels, and names relative to the folder: moved data is the same data."""
        return Listing(self.names, self.labels, self.classes, {}, self.spans).digest()


def find_images(
    location: str, classes: Sequence[str] | None = None, key: str = "data.train", cache_bytes: float = 0.0,
    least: int = 2,
) -> ImageList:  # fmt: skip
    """The images of a folder of class folders, of a .csv or .jsonl list with `path` and `label`, of tar shards, or of
    Parquet files; of class folders and tar shards in object storage too (`s3://bucket/folder`).

    Paths in a list are relative to the list. The order is by name, so that it is the same on every file system; of
    shards it is their own.

    Args:
        classes: the classes that are allowed, in order; without it, those that are found, by name.
        key: what the job calls it, for errors; empty if there is no job.
        cache_bytes: of object storage, that may be kept on the local disk.
        least: classes without `classes`; a model has two, but not all are in all validation data.

    Raises:
        InputError: there is no such folder, a class is empty or unknown, or there are fewer than the least classes.
    """
    root = Path(location)
    if is_remote(location):
        listing, remote, sizes = find_remote(location, SUFFIXES, cache_bytes)
        found = ImageList(
            listing.names, listing.labels, listing.classes, remote.url, location, listing.spans, remote, sizes
        )
    else:
        base, scan = _how_to_scan(location, key)
        listing = indexed(root, partial(scan, root))
        spans = listing.spans and listing.spans.on_disk(str(base), listing.watched)
        found = ImageList(listing.names, listing.labels, listing.classes, str(base), location, spans)
    if not len(listing.names) or (classes is None and len(listing.classes) < least):
        raise _too_few(location, listing)
    names = listing.classes if classes is None else tuple(classes)
    if names == listing.classes:
        return found
    return replace(found, classes=names, labels=_renumbered(listing, names, location))


def passed_over(images: ImageList) -> list[str]:
    """Files below the folder that images were found in and that are none of them, in order of name: hidden, of another
    suffix, or in no class folder. None of a list, which names what is meant, and none in object storage.
    """
    if not os.path.isdir(images.origin):
        return []
    taken = {images.path(number) for number in range(len(images))}
    if images.spans:
        taken = {os.path.join(images.base, name) for name in images.spans.shards}
    found: list[str] = []
    for folder, folders, names in os.walk(images.base, followlinks=True):
        folders[:] = [name for name in folders if not _leads_up(os.path.join(folder, name))]
        found += (path for name in names if (path := os.path.join(folder, name)) not in taken)
    return sorted(found)


def _how_to_scan(location: str, key: str) -> tuple[Path, Callable[[Path], Listing]]:
    """What names are relative to, and how they are found."""
    root = Path(location)
    if shards := shards_of(location):
        if shards[1][0].endswith(PARQUET):
            require_pyarrow(location)
        return Path(shards[0]), partial(_scan_shards, *shards)
    if root.is_dir():
        return root, _scan_folder
    if root.suffix.lower() in (".csv", ".jsonl") and root.is_file():
        return root.parent, _scan_list
    raise _absent(location, key)


def _renumbered(listing: Listing, classes: tuple[str, ...], location: str) -> Column:
    """The labels as numbers of other classes."""
    numbers = {name: number for number, name in enumerate(classes)}
    unknown = [number for number, name in enumerate(listing.classes) if name not in numbers]
    of_unknown = np.isin(listing.labels.array, unknown)
    if of_unknown.any():
        first = int(of_unknown.argmax())
        label = listing.classes[int(listing.labels.array[first])]
        raise InputError(
            f'{location}: label "{label}" of {listing.names[first]} is not among the {len(classes)} classes of the '
            "training data",
            f"those are {', '.join(classes[:8])}{', ...' if len(classes) > 8 else ''}",
            "remove it, or add the class to the training data",
        )
    return Column(np.array([numbers.get(name, -1) for name in listing.classes], np.int32)[listing.labels.array])


def _listing(pairs: Sequence[tuple[str, str]], watched: Mapping[str, str]) -> Listing:
    """From names and the names of their classes."""
    classes = tuple(sorted({label for _, label in pairs}))
    labels = label_column([label for _, label in pairs], classes)
    return Listing(Texts.of(name for name, _ in pairs), labels, classes, watched)


def _absent(location: str, key: str) -> InputError:
    root = Path(location)
    beside = [entry.name for entry in root.parent.iterdir()] if root.parent.is_dir() else []
    near = get_close_matches(root.name, beside, n=1)
    other = str(root.parent / near[0]) if near else "FOLDER"
    if "://" in location:
        cause = (
            f"what is read are folders of this machine, and object storage: {', '.join(f'{one}://' for one in SCHEMES)}"
        )
        return InputError(f"{location} is no place that data is read from", cause, "name one of those")
    if root.exists():
        cause = "a folder of class folders, a .csv or .jsonl list, .tar shards or .parquet files are read"
        return InputError(f"{root} is none of the kinds of data that are read here", cause, "name one of those")
    return InputError(
        f"no data at {root}",
        f"there is no such folder and no such .csv or .jsonl list{f'; {near[0]} is there' if near else ''}",
        f"{f'--set {key}={other}' if key else other}  (paths are relative to {Path.cwd()})",
    )


def _too_few(location: str, listing: Listing) -> InputError:
    root, found = Path(location), listing.classes
    if listing.spans:
        cause = f"the classes in the shards are {', '.join(found)}" if found else "the shards hold no image"
        fix = "name shards with images of at least two classes"
    elif is_remote(location):
        cause = f"classes are the folders in it: {', '.join(found) or 'there are none'}"
        fix = f"put images of each class below one name: {location.rstrip('/')}/CLASS/IMAGE, or name .tar shards"
    elif root.is_file():
        cause = f"its labels are {', '.join(found)}" if found else "it lists no file"
        fix = "add lines of path and label"
    elif any(Path(name).suffix.lower() in SUFFIXES for name in os.listdir(root)):
        cause = "images lie in it directly; classes are the folders in it"
        fix = f"move them into class folders: {root}/CLASS/IMAGE"
    else:
        cause = f"classes are the folders in it: {', '.join(found) or 'there are none'}"
        fix = "give each class a folder of its own, or name a list with a label column"
    return InputError(f"{location} has {count(len(found), 'class', 'classes')}; at least 2 are needed", cause, fix)


def _scan_shards(base: str, names: list[str], root: Path) -> Listing:
    watched = states_of(base, names, root.is_dir())
    if names[0].endswith(PARQUET):
        return scan_parquet(base, names, watched)
    return scan_shards(base, names, SUFFIXES, lambda name: open(os.path.join(base, name), "rb"), watched)


def _scan_folder(root: Path) -> Listing:
    watched: dict[str, str] = {}
    _watch(str(root), watched)
    return _listing(list(_folder(str(root), watched)), watched)


def _watch(path: str, watched: dict[str, str]) -> None:
    watched[os.path.abspath(path)] = state_of(path)


def _folder(root: str, watched: dict[str, str]) -> Iterable[tuple[str, str]]:
    """Names relative to the root and their class; `watched` gets the folders on the way."""
    for name in sorted(os.listdir(root)):
        folder = os.path.join(root, name)
        if name.startswith("."):
            continue
        if os.path.islink(folder) and not os.path.lexists(os.path.realpath(folder)):
            what = f"{folder} is a link that leads nowhere"
            raise InputError(what, "its class would be missing", f"mount what it leads to, or: rm {folder}")
        if not os.path.isdir(folder) or _leads_up(folder):
            continue
        files = sorted(_files(folder, watched))
        if not files:
            raise InputError(
                f"class folder {folder} has no images",
                f"it holds no {', '.join(sorted(SUFFIXES))} file",
                f"put images in, or remove it: rmdir {folder}",
            )
        yield from ((file[len(os.path.join(root, "")) :], name) for file in files)


def _files(root: str, watched: dict[str, str]) -> Iterable[str]:
    for folder, folders, names in os.walk(root, onerror=_raise, followlinks=True):
        _watch(folder, watched)
        folders[:] = [
            name for name in folders if not name.startswith(".") and not _leads_up(os.path.join(folder, name))
        ]
        for name in names:
            if os.path.splitext(name)[1].lower() in SUFFIXES and not name.startswith("."):
                yield os.path.join(folder, name)


def _raise(error: OSError) -> None:
    """os.walk would go on without the folder."""
    what = f"cannot look into {error.filename}"
    raise InputError(what, error.strerror or str(error), f"see who may read it: ls -ld {error.filename}")


def _leads_up(folder: str) -> bool:
    """Whether a folder is a link to one that it lies in: following it would not end."""
    if not os.path.islink(folder):
        return False
    target = Path(folder).resolve()
    return any(parent.resolve().is_relative_to(target) for parent in Path(folder).parents)


def _scan_list(file: Path) -> Listing:
    watched: dict[str, str] = {}
    _watch(str(file), watched)
    pairs = _csv(file) if file.suffix.lower() == ".csv" else _jsonl(file)
    return _listing(list(pairs), watched)


def _lines(file: Path) -> io.StringIO:
    try:
        return io.StringIO(file.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        wide = file.read_bytes().startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        fix = f"write it as UTF-8: iconv -f {'UTF-16' if wide else 'LATIN1'} -t UTF-8 {file}"
        raise InputError(f"cannot read {file}", str(error), fix) from None


def _csv(file: Path) -> Iterable[tuple[str, str]]:
    reader = csv.DictReader(_lines(file), strict=True, skipinitialspace=True)
    try:
        if reader.fieldnames is None:  # the file is empty
            return
        reader.fieldnames = [name.strip() for name in reader.fieldnames]
        if any(reader.fieldnames.count(name) != 1 for name in ("path", "label")):
            raise InputError(
                f"{file} has the columns {', '.join(reader.fieldnames or ['none'])}",
                "a list needs path and label, each once",
                "make its first line: path,label",
            )
        for row in reader:
            path, label = _path(row["path"] or "", file.parent), (row["label"] or "").strip()
            if None in row:
                what = f"{file}, line {reader.line_num} has more columns than the first line"
                raise InputError(what, "a comma in a path has to be quoted", '"a,b.jpg",cat')
            if not path or not label:
                what = f'{file}, line {reader.line_num}: path is "{path}" and label is "{label}"'
                raise InputError(what, "neither may be empty", "cat/1.jpg,cat")
            yield path, label
    except csv.Error as error:
        what = f"{file}, line {reader.line_num}, is no line of a .csv file"
        raise InputError(what, str(error), 'close every quotation mark: "cat/1.jpg",cat') from None


def _path(cell: str, base: Path) -> str:
    """Without the blanks around it, unless a file's name has them."""
    stripped = cell.strip()
    return cell if cell != stripped and os.path.exists(os.path.join(base, cell)) else stripped


def _jsonl(file: Path) -> Iterable[tuple[str, str]]:
    for number, line in enumerate(_lines(file), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not row["path"] or row["label"] in (None, ""):
                raise ValueError("path or label is empty")
            if isinstance(row["label"], list | dict):  # its text would become a class of its own
                raise ValueError("label is no text and no number: an image has one class")
            str(row["path"]).encode(errors="surrogateescape")  # "\\ud83d", half a character, is in no file's name
            yield str(row["path"]), str(row["label"])
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{file}, line {number}: {line.strip()[:80]}",
                f"a line of it is an object with path and label ({type(error).__name__}: {error})",
                '{"path": "cat/1.jpg", "label": "cat"}',
            ) from None
