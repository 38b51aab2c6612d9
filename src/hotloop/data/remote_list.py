"""The images that lie at a place in object storage: in class folders, or in tar shards."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from hotloop.core.errors import InputError
from hotloop.data.columns import Column, Texts
from hotloop.data.index import indexed
from hotloop.data.listing import Listing, label_column
from hotloop.data.remote import Object, Remote, find_objects, keep_on_disk, list_objects, store_key
from hotloop.data.shards import expanded, scan_shards

_OF_DISKS = (".parquet", ".csv", ".jsonl", ".npz", ".tar.gz", ".tgz")
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
    if location.endswith(_OF_DISKS):
        what = f"{location} is in object storage"
        raise InputError(
            what, "class folders and .tar shards are read from there", "copy it here, or name one of those"
        )
    url, _, last = location.rstrip("/").rpartition("/")
    if last.endswith(".tar"):
        names = expanded(last)
        there = find_objects(url, names)
        if missing := sorted(set(names) - {each.name for each in there}):
            what = f"no shard {url}/{missing[0]}"
            cause = f"{location} means {len(names)} objects; {len(missing)} are not there"
            raise InputError(what, cause, "name those there")
        return _in_shards(url, there, suffixes, cache_bytes)
    url = location.rstrip("/")
    objects = [each for each in list_objects(url) if not _is_hidden(each.name)]
    images = [each for each in objects if "/" in each.name and Path(each.name).suffix.lower() in suffixes]
    shards = sorted(each.name for each in objects if each.name.endswith(".tar") and "/" not in each.name)
    if shards and not images:
        by_name = {each.name: each for each in objects}
        return _in_shards(url, [by_name[name] for name in shards], suffixes, cache_bytes)
    return _in_folders(url, sorted(images, key=lambda each: (_class_of(each), each.name)), cache_bytes)


def _is_hidden(name: str) -> bool:
    """As in folders on a disk: a class, a folder in it or a file whose name begins with a dot."""
    return any(part.startswith(".") for part in name.split("/"))


def _class_of(image: Object) -> str:
    return image.name.partition("/")[0]


def _in_folders(url: str, images: Sequence[Object], cache_bytes: float) -> tuple[Listing, Remote, Column]:
    labels = [_class_of(each) for each in images]
    classes = tuple(sorted(set(labels)))
    listing = Listing(Texts.of(each.name for each in images), label_column(labels, classes), classes, {})
    sizes = Column(np.fromiter((each.size for each in images), np.int64, len(images)))
    return listing, keep_on_disk(url, images, cache_bytes), sizes


def _in_shards(
    url: str, shards: Sequence[Object], suffixes: frozenset[str], cache_bytes: float
) -> tuple[Listing, Remote, None]:
    remote = keep_on_disk(url, shards, cache_bytes)
    sizes = {each.name: each.size for each in shards}
    states = {each.name: each.state for each in shards}

    def scan() -> Listing:
        names = [each.name for each in shards]
        with ThreadPoolExecutor(_AT_ONCE, "hotloop-shards") as pool:
            return scan_shards(url, names, suffixes, lambda name: remote.open(name, sizes[name]), states, pool.map)

    return indexed(Path("/", store_key(url)), scan, states=states), remote, None
