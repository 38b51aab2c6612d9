"""Copies of a run's checkpoints in object storage, made beside the training: what remains when the disk does not."""

import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotloop.core.errors import CheckpointError, InputError
from hotloop.core.files import new_directory
from hotloop.core.job import CheckpointSection
from hotloop.data.object_store import obstore_module, open_store, reason
from hotloop.train.checkpoint.checkpointer import verify_checkpoint
from hotloop.train.checkpoint.files import MANIFEST, Position, checkpoint_name, position_of

_PIECE_BYTES = 1 << 26
_PART_BYTES, _MOST_PARTS = 1 << 24, 9000
"""Of an object that is sent in parts; a store takes 10,000 of them."""
_ENCRYPTION = {"aes256": "AES256", "kms": "aws:kms"}
"""As S3 calls them in `x-amz-server-side-encryption`."""


@dataclass(frozen=True)
class Copy:
    """What came of copying a checkpoint.

    Attributes:
        place: where it is; or should be.
        trouble: why it is not; empty if it is.
    """

    place: str
    seconds: float
    trouble: str = ""


class Copies:
    """Copies of one run's checkpoints.

    Args:
        settings: where they go, and how they are encrypted there.
        run: the run's name.

    Raises:
        InputError: obstore is not installed, or the store does not do what is asked for, or does not answer.
    """

    def __init__(self, settings: CheckpointSection, run: str) -> None:
        self.url = f"{settings.copy_to.rstrip('/')}/{run}"
        self._keep = settings.keep
        self._obstore = obstore_module()
        self._store = open_store(self.url, **_encryption(settings))
        self._threads = ThreadPoolExecutor(1, "hotloop-copies")
        self._begun: list[Future[Copy]] = []
        self._aside = Path()
        self.positions()

    def positions(self) -> list[Position]:
        """Of the whole ones, newest first.

        Raises:
            InputError: the store does not answer.
        """
        names = {name.rpartition("/")[0] for name in self._names() if name.endswith(f"/{MANIFEST}")}
        return sorted((position for name in names if (position := position_of(name))), reverse=True)

    def _names(self) -> list[str]:
        try:
            return [each["path"] for page in self._obstore.list(self._store) for each in page]
        except (self._obstore.exceptions.BaseError, OSError) as error:
            fix = "see that the machine's credentials may list and write there"
            raise InputError(f"checkpoint.copy_to: {self.url} does not answer", reason(error), fix) from None

    def fetch_newest(self, folder: Path, warn: Callable[[str], None]) -> Path | None:
        """Bring the newest one that is whole to a folder; nothing if there is none.

        Raises:
            CheckpointError: one cannot be read now.
            OSError: it cannot be written.
        """
        for position in self.positions():
            name = checkpoint_name(position)
            files = [path for path in self._names() if path.startswith(f"{name}/")]
            with new_directory(folder / name) as temporary:
                for file in files:
                    self._fetch(file, temporary / file.rpartition("/")[2])
            try:
                verify_checkpoint(folder / name)
                return folder / name
            except CheckpointError as error:
                warn(f"{self.url}/{name}: {error.cause}; trying the one before")
                (folder / name).rename(folder / f"damaged-{name}")
        return None

    def _fetch(self, name: str, file: Path) -> None:
        """In pieces: a store's patience is for one answer, and large files take longer."""
        try:
            size = self._obstore.head(self._store, name)["size"]
            with file.open("wb") as opened:
                for start in range(0, size, _PIECE_BYTES):
                    length = min(_PIECE_BYTES, size - start)
                    opened.write(self._obstore.get_range(self._store, name, start=start, length=length))
        except self._obstore.exceptions.BaseError as error:
            fix = "see whether the store answers, and start again"
            raise CheckpointError(f"{self.url}/{name} cannot be read", reason(error), fix) from None

    def begin(self, checkpoint: Path) -> None:
        """Copy one as soon as the one before is done; of those that wait only the newest is copied."""
        if self._begun and self._begun[-1].cancel():
            shutil.rmtree(self._aside)
        self._aside = checkpoint.with_name(f".copied-{checkpoint.name}")
        try:
            shutil.rmtree(self._aside, ignore_errors=True)
            shutil.copytree(checkpoint, self._aside, copy_function=_link)  # it may be removed before it is sent
        except (OSError, shutil.Error) as error:
            failed: Future[Copy] = Future()
            failed.set_result(Copy(f"{self.url}/{checkpoint.name}", 0.0, str(error)))
            self._begun.append(failed)
            return
        self._begun.append(self._threads.submit(self._copied, self._aside, checkpoint.name))

    def done(self) -> bool:
        """Whether nothing is under way."""
        return all(one.done() for one in self._begun)

    def finished(self, wait: bool = False) -> list[Copy]:
        """What has been copied, or could not be, since this was last asked.

        Args:
            wait: for all that have been begun.
        """
        done = [one for one in self._begun if wait or one.done()]
        self._begun = [one for one in self._begun if one not in done]
        return [one.result() for one in done if not one.cancelled()]

    def drop_newer(self, position: Position) -> None:
        """Remove those after a position: the run goes on from before them."""
        for newer in self.positions():
            if newer > position:
                self._remove(checkpoint_name(newer))

    def close(self) -> None:
        """Copy nothing more."""
        self._threads.shutdown(cancel_futures=True)

    def _copied(self, folder: Path, name: str) -> Copy:
        place, started, trouble = f"{self.url}/{name}", time.perf_counter(), ""
        try:
            for file in sorted(folder.iterdir(), key=lambda file: file.name == MANIFEST):  # it says: all are there
                size = max(_PART_BYTES, file.stat().st_size // _MOST_PARTS)
                self._obstore.put(self._store, f"{name}/{file.name}", file, chunk_size=size)
            kept = {checkpoint_name(position) for position in self.positions()[: self._keep]}
            for old in {path.partition("/")[0] for path in self._names()} - kept - {name}:
                self._remove(old)
        except (self._obstore.exceptions.BaseError, OSError) as error:
            trouble = reason(error)
        except InputError as error:
            trouble = error.cause
        shutil.rmtree(folder, ignore_errors=True)
        return Copy(place, time.perf_counter() - started, trouble)

    def _remove(self, name: str) -> None:
        found = sorted(path for path in self._names() if path.startswith(f"{name}/"))
        for path in sorted(found, key=lambda path: not path.endswith(MANIFEST)):
            self._obstore.delete(self._store, path)


def _link(file: str, link: str) -> None:
    try:
        os.link(file, link)
    except OSError:  # not every file system has links
        shutil.copyfile(file, link)


def _encryption(settings: CheckpointSection) -> dict[str, Any]:
    if settings.encryption == "store" and not settings.kms_key:
        return {}
    if not settings.copy_to.startswith("s3://"):
        raise InputError(
            f"checkpoint.encryption does not go with {settings.copy_to}",
            "it is a request to S3; other stores encrypt as their buckets say",
            "--set checkpoint.encryption=store",
        )
    if settings.kms_key and settings.encryption != "kms":
        fix = "--set checkpoint.encryption=kms"
        raise InputError("checkpoint.kms_key without kms", f'encryption is "{settings.encryption}"', fix)
    found = {"server_side_encryption": _ENCRYPTION[settings.encryption]}
    return {**found, "sse_kms_key_id": settings.kms_key} if settings.kms_key else found
