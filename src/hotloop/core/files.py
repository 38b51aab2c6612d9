"""Files that are either there and whole, or not there; and settings read from one."""

import errno
import fcntl
import os
import shutil
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO

from hotloop.core.errors import InputError


def fsync_directory(directory: Path) -> None:
    """Make names created or renamed in `directory` survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_at_once(file: int | IO[Any]) -> bool:
    """Whether a file or folder, opened, could be locked for this process alone; it stays so until it is closed."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def state_of(path: str | int) -> str:
    """Changes when a folder's entries do, or a file's content. Of a path, or of a file that is open."""
    state = os.stat(path)
    return f"{state.st_mtime_ns} {state.st_size} {state.st_ino}"


def user_cache() -> Path | None:
    """Where hotloop keeps what it can make anew; None for a user without a home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "hotloop"
    except RuntimeError:
        return None


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file under a temporary name, fsync it, and rename it into place.

    Readers see the old content or the new, never a part. On an error the old file stands and the temporary is gone.

    Raises:
        OSError: it cannot be written; or there is something of that name that is no file: root would put one in the
            place of a device.
    """
    with atomic(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def atomic(path: Path) -> Iterator[BinaryIO]:
    """The same for a file that is written piece by piece in this block."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no file, but a folder or a device", str(path))
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def require_writable(path: Path, option: str) -> None:
    """Refuse, before long work, what `write_atomic` would refuse after it.

    Args:
        option: that names the file.

    Raises:
        InputError: there is no such folder, it is read-only, or there is something of that name that is no file.
    """
    folder = path.absolute().parent
    if not folder.is_dir():
        cause = f"there is no folder {folder}"
    elif path.exists() and not path.is_file():
        cause = "it is no file, but a folder or a device"
    elif not os.access(folder, os.W_OK):
        cause = f"the folder {folder} is read-only"
    else:
        return
    raise InputError(f"{path} cannot be written", cause, f"{option} ~/{path.name}")


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Fill a directory under a temporary name; when the block ends well, fsync all of it and rename it to `path`.

    An older directory of that name is replaced: it is moved aside before and removed after. On an error nothing of the
    new one is left and the older stands; what a killed process leaves, `recover` mends.
    """
    temporary = start_directory(path)
    try:
        yield temporary
        finish_directory(path)
    except BaseException:
        recover(path)
        raise


def start_directory(path: Path) -> Path:
    """An empty directory to be filled, which `finish_directory(path)` renames to `path`; others may fill it too."""
    recover(path)
    temporary = unfinished(path)
    temporary.mkdir()
    return temporary


def unfinished(path: Path) -> Path:
    """What `path` is called while it is filled."""
    return path.with_name(f".{path.name}.tmp")


def finish_directory(path: Path) -> None:
    """Fsync all of what was started and rename it to `path`."""
    temporary, old = _beside(path)
    for file in temporary.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    fsync_directory(temporary)
    if path.exists():
        path.rename(old)
    temporary.rename(path)
    fsync_directory(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def recover(path: Path) -> None:
    """Mend what a killed `new_directory(path)` left: `path` is the new one if that was done, otherwise the older."""
    temporary, old = _beside(path)
    shutil.rmtree(temporary, ignore_errors=True)
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
    elif old.exists():
        old.rename(path)


def _beside(path: Path) -> tuple[Path, Path]:
    return unfinished(path), path.with_name(f".{path.name}.old")


def read_toml(file: Path, fix: str) -> dict[str, Any]:
    """What a TOML file holds.

    Args:
        fix: what to type to make one.

    Raises:
        InputError: it cannot be read, or is no TOML.
    """
    try:
        return tomllib.loads(file.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"cannot read {file}", str(error), fix) from error
