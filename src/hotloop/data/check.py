"""What is wrong with the images of a data set: every file is read and decoded once."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hotloop.core.errors import DamagedSample
from hotloop.data.dataset import Dataset, Sample
from hotloop.data.decode import decode_whole, kind_of, orientation
from hotloop.data.image_list import ImageList, passed_over
from hotloop.data.loader import Loaders, LoaderSettings

TINY_SIDE = 32
"""Pixels of the shorter side, below which an image counts as tiny."""
HUGE_PIXELS = 16_000_000
"""Pixels, from which decoding takes a hundred times as long as that of a usual photograph."""
UNEVEN = 10.0
"""Times as many images as the smallest class, from which the largest one is a finding."""

_KINDS = ("", "jpeg", "png", "bmp", "gif", "webp")
_KIND_OF_SUFFIX = {"jpg": "jpeg", "jpe": "jpeg", "jfif": "jpeg"}
_BATCH, _DIGEST_BYTES, _REASON_BYTES = 64, 16, 300


@dataclass(frozen=True)
class Fault:
    """A file and what is the matter with it."""

    path: str
    reason: str


@dataclass(frozen=True)
class Group:
    """Files with the same content.

    Attributes:
        labels: the classes that they are said to be of; more than one is a contradiction.
        locations: the data sets that they are in; more than one, and validation tests what was trained.
    """

    paths: list[str]
    labels: list[str]
    locations: list[str]


@dataclass
class Findings:
    """What a check found.

    Attributes:
        images: files that were looked at.
        size_bytes: of all that can be read.
        classes: images of each class, by location.
        wrong_suffix: files whose name says another format than their content.
        rotated: files that a camera marked as lying on their side or upside down (EXIF): viewers turn them, a training
            sees them as they are stored.
        passed_over: files below a folder that are not taken for images of it: hidden, of another suffix, or in no class
            folder.
        uneven: the largest class over the smallest, by location, where that is 10 or more.
        untrained: classes of another data set that the first, the training's, has no image of, by the other's location.
        unvalidated: classes of the first data set that another has no image of, by the other's location.
    """

    images: int = 0
    size_bytes: int = 0
    classes: dict[str, dict[str, int]] = field(default_factory=dict)
    damaged: list[Fault] = field(default_factory=list)
    duplicates: list[Group] = field(default_factory=list)
    wrong_suffix: list[Fault] = field(default_factory=list)
    rotated: list[Fault] = field(default_factory=list)
    tiny: list[Fault] = field(default_factory=list)
    huge: list[Fault] = field(default_factory=list)
    passed_over: list[str] = field(default_factory=list)
    uneven: dict[str, float] = field(default_factory=dict)
    untrained: dict[str, list[str]] = field(default_factory=dict)
    unvalidated: dict[str, list[str]] = field(default_factory=dict)

    @property
    def contradictions(self) -> list[Group]:
        return [group for group in self.duplicates if len(group.labels) > 1]

    @property
    def leaks(self) -> list[Group]:
        return [group for group in self.duplicates if len(group.locations) > 1]

    @property
    def is_error(self) -> bool:
        """Whether something has to be mended: damage, contradicting labels, images in two data sets, untrained
        classes.
        """
        return bool(self.damaged or self.contradictions or self.leaks or self.untrained)


@dataclass(frozen=True)
class _Facts(Dataset):
    """A few numbers of each image in place of its pixels, and of one that is damaged the reason."""

    images: ImageList
    max_pixels: int
    room: Mapping[str, int] = field(default_factory=lambda: {"reason": _REASON_BYTES})

    def __len__(self) -> int:
        return len(self.images)

    def sample(self, index: int, random: np.random.Generator) -> Sample:
        try:
            content = self.images.read(index)
            height, width, _ = decode_whole(content, self.images.path(index), self.max_pixels).shape
        except DamagedSample as damaged:
            reason = damaged.reason.encode()[:_REASON_BYTES]
            return _sample(bytes(_DIGEST_BYTES), [0, 0, 0, 0, 1, len(reason)], reason)
        digest = hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()
        kind = _KINDS.index(kind_of(content))
        return _sample(digest, [height, width, len(content), kind, orientation(content), 0], b"")

    def fingerprint(self) -> str:
        return self.images.fingerprint()


def _sample(digest: bytes, numbers: Sequence[int], reason: bytes) -> Sample:
    arrays = {"digest": np.frombuffer(digest, np.uint8), "reason": np.frombuffer(reason, np.uint8)}
    return {**arrays, "numbers": np.array(numbers, np.int64)}


def check_images(
    sets: Sequence[ImageList], workers: int, max_pixels: int, progress: Callable[[int], None] = lambda done: None
) -> Findings:
    """Look at every image of some data sets; those of one model, so that what is in two of them is found.

    Args:
        sets: the training's first.
        max_pixels: an image of more counts as damaged, as it does in a training.
        progress: told how many more were looked at.

    Returns:
        The findings, each list in the order of the data.
    """
    findings = Findings()
    places: dict[bytes, list[tuple[int, int]]] = defaultdict(list)
    for position, images in enumerate(sets):
        _look_at(images, position, workers, max_pixels, findings, places, progress)
    for found in places.values():
        if len(found) > 1:
            findings.duplicates.append(_group(sets, found))
    _compare_classes(findings)
    return findings


def _compare_classes(findings: Findings) -> None:
    trained, *others = (
        (location, {name for name, images in counts.items() if images}) for location, counts in findings.classes.items()
    )
    for location, names in others:
        if untrained := names - trained[1]:
            findings.untrained[location] = sorted(untrained)
        if unvalidated := trained[1] - names:
            findings.unvalidated[location] = sorted(unvalidated)


def _look_at(
    images: ImageList, position: int, workers: int, max_pixels: int, findings: Findings,
    places: dict[bytes, list[tuple[int, int]]], progress: Callable[[int], None],
) -> None:  # fmt: skip
    counts = Counter(images.label(number) for number in range(len(images)))
    findings.images += len(images)
    findings.passed_over += passed_over(images)
    findings.classes[images.origin] = {name: counts[number] for number, name in enumerate(images.classes)}
    sizes = [count for count in counts.values() if count]
    if max(sizes) / min(sizes) >= UNEVEN:
        findings.uneven[images.origin] = max(sizes) / min(sizes)
    settings = LoaderSettings(min(_BATCH, len(images)), shuffle=False, on_damaged="raise")
    with Loaders([(_Facts(images, max_pixels), settings)], workers) as (loader,):
        for batch in loader.batches():
            for place, index in enumerate(batch.indices):
                digest, reason, numbers = (batch.arrays[name][place] for name in ("digest", "reason", "numbers"))
                if length := int(numbers[-1]):
                    text = reason[:length].tobytes().decode(errors="replace")
                    findings.damaged.append(Fault(images.path(index), text))
                else:
                    _note(images.path(index), numbers.tolist(), findings)
                    places[digest.tobytes()].append((position, index))
            progress(batch.size)


def _note(path: str, numbers: list[int], findings: Findings) -> None:
    """What is odd about a file that can be read."""
    height, width, size_bytes, kind, lies, _ = numbers
    findings.size_bytes += size_bytes
    suffix = Path(path).suffix.lower().removeprefix(".")
    said = _KIND_OF_SUFFIX.get(suffix, suffix)
    # Rows of Parquet files have none; a list may name .tif, whose content is none of the kinds that are told apart.
    if suffix and said != _KINDS[kind] and (said in _KINDS or _KINDS[kind]):
        findings.wrong_suffix.append(Fault(path, f"it is {_KINDS[kind] or 'of another format'}"))
    if lies != 1:
        findings.rotated.append(Fault(path, f"EXIF orientation {lies}"))
    if min(height, width) < TINY_SIDE:
        findings.tiny.append(Fault(path, f"{width} × {height}"))
    if height * width >= HUGE_PIXELS:
        findings.huge.append(Fault(path, f"{width} × {height}"))


def _group(sets: Sequence[ImageList], found: Sequence[tuple[int, int]]) -> Group:
    pairs = [(sets[position], index) for position, index in found]
    labels = {images.classes[images.label(index)] for images, index in pairs}
    return Group(
        [images.path(index) for images, index in pairs], sorted(labels), sorted({images.origin for images, _ in pairs})
    )
