"""Images and their classes, as a scan found them."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import FileIO

import numpy as np

from hotloop.core.errors import DamagedSample
from hotloop.data.columns import Column, Texts


@dataclass(frozen=True)
class Spans:
    """Where the bytes of images lie in shards.

    Attributes:
        places: number of the shard, offset and size in bytes, int64 (images, 3).
        shards: the files' names.
    """

    places: Column
    shards: tuple[str, ...]

    def read(self, number: int, base: str, name: str) -> bytes:
        """An image's bytes.

        Args:
            base: what the shards' names are relative to.
            name: of the image, for errors.

        Raises:
            DamagedSample: the shard cannot be opened, or ends before.
        """
        shard, offset, size = (int(value) for value in self.places.array[number])
        try:
            with open(os.path.join(base, self.shards[shard]), "rb", buffering=0) as file:
                file.seek(offset)
                content = _whole(file, size)
        except OSError as error:
            raise DamagedSample(name, error.strerror or str(error)) from None
        if not content or len(content) < size:
            reason = "the image is empty" if not size else "the shard ends before the image does"
            raise DamagedSample(name, reason)
        return content


def label_column(labels: Sequence[str], classes: Sequence[str]) -> Column:
    """Labels as numbers that count into the classes, int32."""
    numbers = {name: number for number, name in enumerate(classes)}
    return Column(np.fromiter((numbers[label] for label in labels), np.int32, len(labels)))


def _whole(file: FileIO, size: int) -> bytes:
    """So many bytes, or those up to the end: one read may give less."""
    parts = []
    while size and (part := file.read(size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


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
            digest.update(column.array.tobytes())
        return digest.hexdigest()
