"""Files that are either there and whole, or not there."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def fsync_directory(directory: Path) -> None:
    """Make names created or renamed in `directory` survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file under a temporary name, fsync it, and rename it into place.

    Readers see the old content or the new, never a part. On an error the old file stands and the temporary is gone.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Fill a directory under a temporary name; when the block ends well, fsync all of it and rename it to `path`.

    An older directory of that name is replaced. On an error nothing of the new one is left.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        for file in temporary.iterdir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        fsync_directory(temporary)
        shutil.rmtree(path, ignore_errors=True)
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    fsync_directory(path.parent)
