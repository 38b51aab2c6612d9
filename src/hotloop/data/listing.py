"""Images and their classes, as a scan found them."""

import hashlib
import json
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from hotloop.core.errors import DamagedSample
from hotloop.core.files import state_of
from hotloop.data.columns import Column, Texts
from hotloop.data.parquet import SUFFIX, opened, read_row

_OPEN_SHARDS = 256


@dataclass(frozen=True)
class Spans:
    """Where the bytes of images lie in shards.

    Attributes:
        places: int64 (images, 3): number of the shard; of tar files offset and size in bytes, of Parquet files the row
            group and the row in it.
        shards: the files' names.
        states: of those on a disk, each when it was listed; afterwards others may lie where these did.
    """

    places: Column
    shards: tuple[str, ...]
    states: tuple[str, ...] = ()

    def on_disk(self, base: str, watched: Mapping[str, str]) -> "Spans":
        """With the states in which the shards were listed."""
        paths = (os.path.abspath(os.path.join(base, name)) for name in self.shards)
        return replace(self, states=tuple(watched[path] for path in paths))

    def read(self, number: int, base: str, name: str) -> bytes:
        """An image's bytes.

        Args:
            base: what the shards' names are relative to.
            name: of the image, for errors.

        Raises:
            DamagedSample: the shard cannot be opened, is another one by now, or ends before.
        """
        try:
            return self._read(number, base, name)
        except DamagedSample:
            _opened.cache_clear()  # a network disk that has come back gives what was open no more
            return self._read(number, base, name)

    def _read(self, number: int, base: str, name: str) -> bytes:
        shard, offset, size = (int(value) for value in self.places.array[number])
        path = os.path.join(base, self.shards[shard])
        try:
            listed = self.states[shard] if self.states else ""
            file = None if self.are_parquet else _opened(os.path.abspath(path), listed)
            if listed and state_of(file.descriptor if file else path) != listed:
                raise DamagedSample(name, "its file was changed after it was listed: start again")
            if file is None:
                return _some(read_row(path, offset, size, name), name)
            content = file.read(offset, size)
        except OSError as error:
            raise DamagedSample(name, error.strerror or str(error)) from None
        if len(content) < size:
            raise DamagedSample(name, "the shard ends before the image does")
        return _some(content, name)

    def place(self, number: int) -> tuple[str, int, int]:
        """An image's shard, offset and bytes in it; of tar files."""
        shard, offset, size = (int(value) for value in self.places.array[number])
        return self.shards[shard], offset, size

    @property
    def are_parquet(self) -> bool:
        return self.shards[0].endswith(SUFFIX) if self.shards else False

    def size_bytes(self, number: int, base: str) -> int:
        """Of an image; in Parquet files the mean of its row group."""
        shard, second, third = (int(value) for value in self.places.array[number])
        if not self.are_parquet:
            return third
        file = opened(os.path.join(base, self.shards[shard]))
        return file.group_bytes(second) // max(1, int(file.metadata.row_group(second).num_rows))

    def most_bytes(self, base: str) -> int:
        """No image has more."""
        if not self.are_parquet:
            return int(self.places.array[:, 2].max(initial=0))
        groups = np.unique(self.places.array[:, :2], axis=0).tolist()
        return max(
            (opened(os.path.join(base, self.shards[shard])).group_bytes(group) for shard, group in groups), default=0
        )


def _some(content: bytes, name: str) -> bytes:
    if not content:
        raise DamagedSample(name, "the image is empty")
    return content


def label_column(labels: Sequence[str], classes: Sequence[str]) -> Column:
    """Labels as numbers that count into the classes, int32."""
    numbers = {name: number for number, name in enumerate(classes)}
    return Column(np.fromiter((numbers[label] for label in labels), np.int32, len(labels)))


class _Shard:
    """A shard that is open, for as long as somebody has it."""

    def __init__(self, path: str) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)

    def read(self, offset: int, size: int) -> bytes:
        """So many bytes from there on, or those up to the end: one read may give less."""
        parts = []
        while size and (part := os.pread(self.descriptor, size, offset)):
            parts.append(part)
            offset, size = offset + len(part), size - len(part)
        return b"".join(parts)


@lru_cache(maxsize=_OPEN_SHARDS)
def _opened(path: str, state: str) -> _Shard:
    """A shard as it was listed; those used last stay open in each process, as each image lies in another."""
    return _Shard(path)


@dataclass(frozen=True)
class Listing:
    """Files and their class.

    Attributes:
        names: of the files, relative to one place, in order.
        labels: int32, counting into `classes`.
        classes: in order of name.
        watched: folders and files whose change would change the listing, and their state.
        spans: where the images lie in shards; None if each is a file.
    """

    names: Texts
    labels: Column
    classes: tuple[str, ...]
    watched: Mapping[str, str]
    spans: Spans | None = None

    def digest(self) -> str:
        """Hash over names, labels, classes and places."""
        digest = hashlib.sha256(json.dumps(self.classes).encode())
        columns = [self.names.characters, self.names.ends, self.labels]
        for column in [*columns, *([self.spans.places] if self.spans else [])]:
            digest.update(column.array.data)  # not a copy: a mapped column can be larger than the memory
        return digest.hexdigest()
