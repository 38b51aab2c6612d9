"""The images that lie at a place in object storage: in class folders, or in tar shards."""

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from hotloop.core.errors import InputError
from hotloop.data.columns import Column, Texts
from hotloop.data.index import indexed
from hotloop.data.listing import Listing, label_column
from hotloop.data.remote import Object, Remote, keep_on_disk, list_objects
from hotloop.data.shards import expanded, scan_shards

_AT_ONCE = 16
"""Shards that are looked through at the same time."""


def find_remote(location: str, suffixes: frozenset[str], cache_bytes: float) -> tuple[Listing, Remote, Column | None]:
    """What lies at `s3://bucket/folder`, or in `s3://bucket/train-{000..031}.tar`.

    Args:
        cache_bytes: that may be kept on the local disk.

    Returns:
        the images, where they are read from, and the bytes of each if each is an object.

    Raises:
        InputError: nothing fitting lies there, or the store refuses.
    """
    url, _, last = location.rstrip("/").rpartition("/")
    if last.endswith(".tar"):
        there = {each.name: each for each in list_objects(url)}
        names = list(expanded(last))
        if missing := [name for name in names if name not in there]:
            what = f"no shard {url}/{missing[0]}"
            cause = f"{location} means {len(names)} objects; {len(missing)} are not there"
            raise InputError(what, cause, "name those there")
        return _in_shards(url, [there[name] for name in names], suffixes, cache_bytes)
    url = location.rstrip("/")
    objects = list_objects(url)
    shards = [each for each in objects if each.name.endswith(".tar") and "/" not in each.name]
    if shards:
        return _in_shards(url, shards, suffixes, cache_bytes)
    return _in_folders(url, objects, suffixes, cache_bytes)


def _in_folders(
    url: str, objects: Sequence[Object], suffixes: frozenset[str], cache_bytes: float
) -> tuple[Listing, Remote, Column]:
    images = [each for each in objects if "/" in each.name and Path(each.name).suffix.lower() in suffixes]
    images = [each for each in images if not any(part.startswith(".") for part in each.name.split("/"))]
    labels = [each.name.partition("/")[0] for each in images]
    classes = tuple(sorted(set(labels)))
    listing = Listing(Texts.of(each.name for each in images), label_column(labels, classes), classes, {})
    sizes = Column(np.fromiter((each.size for each in images), np.int64, len(images)))
    return listing, keep_on_disk(url, images, cache_bytes), sizes


def _in_shards(
    url: str, shards: Sequence[Object], suffixes: frozenset[str], cache_bytes: float
) -> tuple[Listing, Remote, None]:
    remote = keep_on_disk(url, shards, cache_bytes)
    sizes = {each.name: each.size for each in shards}
    states = hashlib.sha256("\n".join(f"{each.name} {each.state}" for each in shards).encode()).hexdigest()

    def scan() -> Listing:
        names = [each.name for each in shards]
        with ThreadPoolExecutor(_AT_ONCE, "hotloop-shards") as pool:
            return scan_shards(url, names, suffixes, lambda name: remote.open(name, sizes[name]), {}, pool.map)

    return indexed(Path(f"{url}#{states}"), scan), remote, None
