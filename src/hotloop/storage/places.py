"""What a job uses of object storage: the one list that is granted, tried and reached."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hotloop.core.errors import InputError
from hotloop.core.job import Job
from hotloop.data.object_store import is_remote
from hotloop.data.shards import expanded

Provider = Literal["aws", "gcp", "azure"]
_PROVIDERS: dict[str, Provider] = {"s3": "aws", "gs": "gcp", "az": "azure"}


@dataclass(frozen=True)
class Place:
    """Objects of a bucket that a job uses.

    Attributes:
        url: where a store is opened for them.
        key: of the job, that names it.
        prefix: with which their names begin; empty for a whole bucket.
        names: all of them, if they are known; then nothing is listed.
        writes: objects are written, read back and removed too.
    """

    provider: Provider
    url: str
    key: str
    bucket: str
    prefix: str
    names: tuple[str, ...] = ()
    writes: bool = False


def find_places(job: Job) -> list[Place]:
    """All places of a job, each once.

    A run without `run.dir` has a folder of its own below `checkpoint.copy_to`, of which the beginning is known.

    Raises:
        InputError: a place has no bucket, or a range of shards is none.
    """
    named = {"data.train": job.data.train, "data.val": job.data.val or ""}
    places = [_data(location, key) for key, location in named.items() if is_remote(location)]
    if job.checkpoint.copy_to:
        places.append(_checkpoints(job))
    seen = {(place.url, place.prefix, place.names, place.writes): place for place in reversed(places)}
    return list(reversed(seen.values()))


def _data(location: str, key: str) -> Place:
    provider, bucket, path = _parts(location, key)
    if not path.endswith(".tar"):
        return Place(provider, location.rstrip("/"), key, bucket, f"{path}/" if path else "")
    folder, slash, last = path.rpartition("/")
    names = tuple(f"{folder}{slash}{name}" for name in expanded(last))
    return Place(provider, location.rstrip("/").rpartition("/")[0], key, bucket, common_beginning(names), names)


def _checkpoints(job: Job) -> Place:
    key, url = "checkpoint.copy_to", job.checkpoint.copy_to.rstrip("/")
    if not is_remote(url):
        what = f'{key} = "{url}" is no place in object storage'
        raise InputError(what, "s3://, gs:// and az:// are", f"--set {key}=s3://bucket/folder")
    provider, bucket, path = _parts(url, key)
    run = f"{Path(job.run.dir).absolute().name}/" if job.run.dir else f"{job.name}-"
    return Place(provider, url, key, bucket, f"{path}/{run}" if path else run, writes=True)


def common_beginning(names: tuple[str, ...]) -> str:
    """With which all of them begin."""
    first, last = min(names), max(names)
    same = next((at for at, letter in enumerate(first) if letter != last[at]), len(first))
    return first[:same]


def _parts(location: str, key: str) -> tuple[Provider, str, str]:
    scheme, _, rest = location.partition("://")
    bucket, _, path = rest.partition("/")
    if not bucket:
        raise InputError(f'{key} = "{location}" has no bucket', "it begins a place", f"--set {key}={scheme}://bucket")
    return _PROVIDERS[scheme], bucket, path.strip("/")
