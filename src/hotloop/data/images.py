"""Images in files: class folders and lists, decoded to crops of one size."""

import csv
import hashlib
import io
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import numpy as np

from hotloop.core.errors import InputError
from hotloop.core.units import count
from hotloop.data.dataset import Dataset, Sample
from hotloop.data.decode import Box, decode_crop

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif"})


@dataclass(frozen=True)
class ImageList:
    """Files with their class: `labels[i]` counts into `classes`."""

    paths: tuple[str, ...]
    labels: tuple[int, ...]
    classes: tuple[str, ...]
    origin: str


def find_images(location: str, classes: Sequence[str] | None = None, key: str = "data.train") -> ImageList:
    """The images of a folder of class folders, or of a .csv or .jsonl list with `path` and `label`.

    Paths in a list are relative to the list. The order is by name, so that it is the same on every file system.

    Args:
        classes: the classes that are allowed, in order; without it, those that are found, by name.
        key: what the job calls it, for errors.

    Raises:
        InputError: there is no such folder, a class is empty or unknown, or there are fewer than two classes.
    """
    root = Path(location)
    if root.is_dir():
        pairs = list(_folder(root))
    elif root.suffix.lower() in (".csv", ".jsonl") and root.is_file():
        pairs = list(_csv(root) if root.suffix.lower() == ".csv" else _jsonl(root))
    else:
        raise _absent(root, key)
    found = sorted({label for _, label in pairs})
    if not pairs or (classes is None and len(found) < 2):
        raise _too_few(root, found)
    names = tuple(found if classes is None else classes)
    numbers = {name: number for number, name in enumerate(names)}
    for path, label in pairs:
        if label not in numbers:
            raise InputError(
                f'{location}: label "{label}" of {path} is not among the {len(names)} classes of the training data',
                f"those are {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}",
                "remove it, or add the class to the training data",
            )
    return ImageList(tuple(path for path, _ in pairs), tuple(numbers[label] for _, label in pairs), names, location)


def _absent(root: Path, key: str) -> InputError:
    beside = [entry.name for entry in root.parent.iterdir()] if root.parent.is_dir() else []
    near = get_close_matches(root.name, beside, n=1)
    return InputError(
        f"no data at {root}",
        f"there is no such folder and no such .csv or .jsonl list{f'; {near[0]} is there' if near else ''}",
        f"--set {key}={root.parent / near[0] if near else 'FOLDER'}  (paths are relative to {Path.cwd()})",
    )


def _too_few(root: Path, found: Sequence[str]) -> InputError:
    if root.is_file():
        cause = f"its labels are {', '.join(found)}" if found else "it lists no file"
        fix = "add lines of path and label"
    elif any(Path(name).suffix.lower() in SUFFIXES for name in os.listdir(root)):
        cause = "images lie in it directly; classes are the folders in it"
        fix = f"move them into class folders: {root}/CLASS/IMAGE"
    else:
        cause = f"classes are the folders in it: {', '.join(found) or 'there are none'}"
        fix = "give each class a folder of its own, or name a list with a label column"
    return InputError(f"{root} has {count(len(found), 'class', 'classes')}; at least 2 are needed", cause, fix)


def _folder(root: Path) -> Iterable[tuple[str, str]]:
    for name in sorted(os.listdir(root)):
        folder = os.path.join(root, name)
        if name.startswith(".") or not os.path.isdir(folder) or _leads_up(folder):
            continue
        files = sorted(_files(folder))
        if not files:
            raise InputError(
                f"class folder {folder} has no images",
                f"it holds no {', '.join(sorted(SUFFIXES))} file",
                f"put images in, or remove it: rmdir {folder}",
            )
        yield from ((file, name) for file in files)


def _files(root: str) -> Iterable[str]:
    for folder, folders, names in os.walk(root, followlinks=True):
        folders[:] = [name for name in folders if not _leads_up(os.path.join(folder, name))]
        for name in names:
            if os.path.splitext(name)[1].lower() in SUFFIXES and not name.startswith("."):
                yield os.path.join(folder, name)


def _leads_up(folder: str) -> bool:
    """Whether a folder is a link to one that it lies in: following it would not end."""
    if not os.path.islink(folder):
        return False
    target = Path(folder).resolve()
    return any(parent.resolve().is_relative_to(target) for parent in Path(folder).parents)


def _lines(file: Path) -> io.StringIO:
    try:
        return io.StringIO(file.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        fix = f"write it as UTF-8: iconv -f LATIN1 -t UTF-8 {file}"
        raise InputError(f"cannot read {file}", str(error), fix) from None


def _csv(file: Path) -> Iterable[tuple[str, str]]:
    reader = csv.DictReader(_lines(file), strict=True)
    try:
        if reader.fieldnames is None:  # the file is empty
            return
        if not {"path", "label"} <= set(reader.fieldnames):
            raise InputError(
                f"{file} has the columns {', '.join(reader.fieldnames or ['none'])}",
                "a list needs path and label",
                "make its first line: path,label",
            )
        for row in reader:
            path, label = row["path"], row["label"]
            if not path or not label:
                what = f'{file}, line {reader.line_num}: path is "{path or ""}" and label is "{label or ""}"'
                raise InputError(what, "neither may be empty", "cat/1.jpg,cat")
            yield str(file.parent / path), label
    except csv.Error as error:
        what = f"{file}, line {reader.line_num}, is no line of a .csv file"
        raise InputError(what, str(error), 'close every quotation mark: "cat/1.jpg",cat') from None


def _jsonl(file: Path) -> Iterable[tuple[str, str]]:
    for number, line in enumerate(_lines(file), 1):
        try:
            row = json.loads(line)
            if not row["path"] or row["label"] in (None, ""):
                raise ValueError("path or label is empty")
            yield str(file.parent / row["path"]), str(row["label"])
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{file}, line {number}: {line.strip()[:80]}",
                f"a line of it is an object with path and label ({type(error).__name__}: {error})",
                '{"path": "cat/1.jpg", "label": "cat"}',
            ) from None


@dataclass(frozen=True)
class RandomCrop:
    """A crop of random area and shape, and a random flip.

    Attributes:
        scale: share of the area, lowest and highest.
        ratio: width to height, lowest and highest; drawn evenly in its logarithm.
        flip: probability of a horizontal flip.
    """

    scale: tuple[float, float]
    ratio: tuple[float, float]
    flip: float

    def draw(self, height: int, width: int, random: np.random.Generator) -> Box:
        """The crop of an image of that size. The distribution is that of torchvision's RandomResizedCrop."""
        flip = random.random() < self.flip
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        for _ in range(10):
            area = height * width * (self.scale[0] + (self.scale[1] - self.scale[0]) * random.random())
            ratio = math.exp(low + (high - low) * random.random())
            crop_width, crop_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < crop_width <= width and 0 < crop_height <= height:
                top = int(random.integers(height - crop_height + 1))
                left = int(random.integers(width - crop_width + 1))
                return Box(top, left, crop_height, crop_width, flip)
        ratio = min(max(width / height, self.ratio[0]), self.ratio[1])
        crop_width, crop_height = min(width, round(height * ratio)), min(height, round(width / ratio))
        return Box((height - crop_height) // 2, (width - crop_width) // 2, crop_height, crop_width, flip)


@dataclass(frozen=True)
class CenterCrop:
    """The square in the middle; its side is `share` of the shorter side."""

    share: float

    def draw(self, height: int, width: int, random: np.random.Generator) -> Box:
        """The crop of an image of that size; nothing is drawn."""
        side = max(1, round(min(height, width) * self.share))
        return Box((height - side) // 2, (width - side) // 2, side, side, False)


@dataclass(frozen=True)
class ImageFiles(Dataset):
    """Crops of the images of a list.

    A sample is `images`, uint8 (size, size, 3), red green blue, and `labels`, int64. Where a device resizes, it is
    `pixels` and `boxes` in place of `images`, as `Cut.packed` gives them.
    """

    images: ImageList
    size: int
    crop: RandomCrop | CenterCrop
    max_pixels: int
    resize: bool = True

    @property
    def room(self) -> Mapping[str, int]:  # type: ignore[override]
        """Of twice the size each way, which is nearly always enough, as JPEG is scaled by half where there is more."""
        return {} if self.resize else {"pixels": (2 * self.size) ** 2 * 3}

    def __len__(self) -> int:
        return len(self.images.paths)

    def sample(self, index: int, random: np.random.Generator) -> Sample:
        cut = decode_crop(
            self.images.paths[index], self.size, lambda h, w: self.crop.draw(h, w, random), self.max_pixels
        )
        labels = np.asarray(self.images.labels[index], dtype=np.int64)
        if self.resize:
            return {"images": cut.resized(self.size), "labels": labels}
        pixels, boxes = cut.packed(self.size, self.room["pixels"])
        return {"pixels": pixels, "boxes": boxes, "labels": labels}

    def name(self, index: int) -> str:
        return self.images.paths[index]

    def fingerprint(self) -> str:
        """Hash over classes, labels, and file names relative to the folder: moved data is the same data."""
        digest = hashlib.sha256(_encoded("\0".join(self.images.classes)))
        root = os.path.dirname(self.images.origin) if os.path.isfile(self.images.origin) else self.images.origin
        for path, label in zip(self.images.paths, self.images.labels, strict=True):
            digest.update(_encoded(f"\0{os.path.relpath(path, root)}\0{label}"))
        return digest.hexdigest()


def _encoded(names: str) -> bytes:
    """File names that are no UTF-8 as the bytes that they are."""
    return names.encode(errors="surrogateescape")
