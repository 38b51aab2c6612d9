"""Images into tar shards: a few large files in place of a million small ones."""

import io
import json
import tarfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

from hotloop.core.errors import DamagedSample, InputError
from hotloop.core.files import lock_at_once, new_directory
from hotloop.data.check import Fault
from hotloop.data.dataset import Dataset, Sample
from hotloop.data.decode import decode_whole, kind_of
from hotloop.data.image_list import SUFFIXES, ImageList
from hotloop.data.loader import Batch, Loaders, LoaderSettings

_BATCH_BYTES = 64 * 2**20
"""Of images that are on their way together, at most."""
_SUFFIXES = {"jpeg": "jpg"}


@dataclass(frozen=True)
class PackSettings:
    """How images are packed.

    Attributes:
        side: images whose shorter side is longer are resized to it and become JPEG; 0: every image stays as it is.
        quality: of that JPEG.
        shard_bytes: from which the next shard is begun.
        seed: of the order, which is drawn once, so that readers from front to back see the classes mixed.
        max_pixels: an image of more counts as damaged.
    """

    side: int = 0
    quality: int = 90
    shard_bytes: int = 256 * 2**20
    seed: int = 0
    max_pixels: int = 100_000_000


@dataclass
class Packed:
    """What was written.

    Attributes:
        images: in the shards.
        shards: their names, in order.
        size_bytes: of the shards.
        damaged: left out.
    """

    images: int = 0
    shards: list[str] = field(default_factory=list)
    size_bytes: int = 0
    damaged: list[Fault] = field(default_factory=list)


@dataclass(frozen=True)
class _Encoded(Dataset):
    """The bytes that go into the shard, and how many; of a damaged image the reason, its length negative."""

    images: ImageList
    settings: PackSettings
    room: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.images)

    def sample(self, index: int, random: np.random.Generator) -> Sample:
        try:
            content = _encoded(self.images.read(index), self.images.path(index), self.settings)
            length = len(content)
        except DamagedSample as damaged:
            content = damaged.reason.encode()[: self.room["content"]]
            length = -len(content)
        return {"content": np.frombuffer(content, np.uint8), "length": np.asarray(length, np.int64)}

    def fingerprint(self) -> str:
        return self.images.fingerprint()


def _encoded(content: bytes, name: str, settings: PackSettings) -> bytes:
    """As it is; or resized, if that makes it smaller."""
    if not _suffix(content, name):
        raise DamagedSample(name, "its format is none of those that are read from shards")
    pixels = decode_whole(content, name, settings.max_pixels)
    height, width = pixels.shape[:2]
    part = settings.side / min(height, width)
    if not settings.side or part >= 1:
        return content
    size = (max(1, round(width * part)), max(1, round(height * part)))
    file = io.BytesIO()
    Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC).save(file, "JPEG", quality=settings.quality)
    return min(file.getvalue(), content, key=len)


def _suffix(content: bytes, path: str) -> str:
    """Under which it is found in a shard: of its format, else its file's; empty if it would not be found."""
    kind, own = kind_of(content), Path(path).suffix.lower()
    return _SUFFIXES.get(kind, kind) or (own.removeprefix(".") if own in SUFFIXES else "")


def check_folder(folder: Path) -> None:
    """See whether images can be packed into a folder.

    Raises:
        InputError: it is there and not empty, or it is the folder that this process is in.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} is not empty", "packing makes the folder anew", "name another folder, or remove it")
    if folder.exists() and folder.samefile("."):  # another folder of its name would take its place
        what = f"{folder} is the folder that you are in"
        raise InputError(what, "packing makes the folder anew", "name another folder, or a new one in it")


def pack_images(
    images: ImageList, folder: Path, settings: PackSettings, workers: int,
    progress: Callable[[int], None] = lambda done: None,
) -> Packed:  # fmt: skip
    """Write shards `000000.tar`, ... into a folder: each image with its class as a number (.cls) and by name (.json).

    Every image is decoded, and left out if it is damaged. The same images and settings give the same bytes, whatever
    the number of workers. The folder is there when all is in it, and not before.

    Raises:
        InputError: the folder is there and not empty, it is the folder that this process is in, or another process
            packs into it.
    """
    check_folder(folder)
    folder = folder.resolve()  # a link to another disk stays, and what it leads to is filled
    folder.parent.mkdir(parents=True, exist_ok=True)
    largest = max(256, images.most_bytes())
    data = _Encoded(images, settings, {"content": largest})
    batch = min(len(images), max(1, min(64, _BATCH_BYTES // largest)))
    packed = Packed()
    loaders = Loaders([(data, LoaderSettings(batch, settings.seed, on_damaged="raise"))], workers)
    with _alone(folder), loaders as (loader,), new_directory(folder) as temporary:
        entries = _entries(loader.batches(), images, packed, progress)
        entry = next(entries, None)
        while entry:
            name = f"{len(packed.shards):06d}.tar"
            with tarfile.open(temporary / name, "w", format=tarfile.USTAR_FORMAT) as tar:
                while entry and tar.offset < settings.shard_bytes:
                    _add(tar, *entry)
                    entry = next(entries, None)
            packed.shards.append(name)
            packed.size_bytes += (temporary / name).stat().st_size
    return packed


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other processes from packing into a folder: both would write under the same temporary name."""
    lock = folder.with_name(f".{folder.name}.lock")
    with lock.open("wb") as file:
        free = True
        with suppress(OSError):  # a file system without locks
            free = lock_at_once(file)
        if not free:
            what = f"another process packs into {folder}"
            raise InputError(what, "a folder is made by one", "wait for it, or name another folder")
        try:
            check_folder(folder)  # another may just have ended
            yield
        finally:
            lock.unlink(missing_ok=True)


def _add(tar: tarfile.TarFile, key: str, suffix: str, content: bytes, label: int, name: str) -> None:
    for ending, part in (
        (suffix, content),
        ("cls", str(label).encode()),
        ("json", json.dumps({"label": name}).encode()),
    ):
        member = tarfile.TarInfo(f"{key}.{ending}")
        member.size = len(part)
        tar.addfile(member, io.BytesIO(part))


def _entries(
    batches: Iterator[Batch], images: ImageList, packed: Packed, progress: Callable[[int], None]
) -> Iterator[tuple[str, str, bytes, int, str]]:
    """Key, suffix, content, number and name of the class of each image that can be read."""
    for batch in batches:
        for place, index in enumerate(batch.indices):
            length = int(batch.arrays["length"][place])
            content = batch.arrays["content"][place][: abs(length)].tobytes()
            if length < 0:
                packed.damaged.append(Fault(images.path(index), content.decode(errors="replace")))
            else:
                label = images.label(index)
                key, suffix = f"{packed.images:09d}", _suffix(content, images.path(index))
                yield key, suffix, content, label, images.classes[label]
                packed.images += 1
        progress(batch.size)
