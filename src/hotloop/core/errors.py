"""Errors that a user can act on: what happened, why, and what to type.

```
HotloopError            exit 1: the work failed
├── InputError          exit 2: bad usage or bad input, nothing was started
├── DamagedSample       one sample that cannot be read; replaced and counted by default
├── NonFiniteLoss       exit 1: NaN or Inf in the loss
├── CheckpointError     exit 1: a checkpoint could not be written or read
└── WorkerError         exit 1: a data worker failed or died
```
"""

import errno
import os
from pathlib import Path


class HotloopError(Exception):
    """An error of three lines.

    Args:
        what: what happened, with the value received and the limit.
        cause: why.
        fix: what to type or change.
    """

    exit_code = 1

    def __init__(self, what: str, cause: str, fix: str) -> None:
        super().__init__(what, cause, fix)
        self.what = what
        self.cause = cause
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.what}\ncause: {self.cause}\nfix:   {self.fix}"


class InputError(HotloopError):
    """What was typed or named cannot be used; nothing was started and nothing changed."""

    exit_code = 2


class NonFiniteLoss(HotloopError):
    """The loss became NaN or Inf."""


class CheckpointError(HotloopError):
    """A checkpoint could not be written or read."""


class WorkerError(HotloopError):
    """A data worker raised an error of the data set's own, or kept dying."""


class DamagedSample(HotloopError):
    """One sample that cannot be read.

    A [`Dataset`][hotloop.Dataset] raises it from `sample()`; the loader replaces the sample and counts it.

    Args:
        name: the file or record.
        reason: why it cannot be read, in one line; what was caught will do.
    """

    def __init__(self, name: object, reason: object) -> None:
        name, reason = str(name), str(reason)  # they travel between processes, and into checkpoints
        super().__init__(
            f"{name} cannot be read",
            reason,
            'repair or remove the file, or let it be replaced: --set data.on_corrupt="replace"',
        )
        self.name = name
        self.reason = reason

    def __reduce__(self) -> tuple[type["DamagedSample"], tuple[str, str]]:
        return DamagedSample, (self.name, self.reason)


_NO_SPACE = {
    errno.ENOSPC: "free some space (df -h), then start the same command again",
    errno.EDQUOT: "raise the quota or free some space, then start the same command again",
}
_ANOTHER_PLACE = {
    errno.EROFS: "choose a folder that can be written to",
    errno.EACCES: "choose a folder that can be written to",
    errno.EPERM: "choose a folder that can be written to",
    errno.ENOENT: "make that folder first, or see that its disk is mounted",
    errno.ENOTDIR: "a part of that path is a file",
    errno.EEXIST: "a part of that path is a file",
    errno.ENAMETOOLONG: "choose a shorter name",
}
FIXES = _NO_SPACE | _ANOTHER_PLACE
"""What to do about a failed write, by errno."""


def cannot_access(path: Path, error: OSError, kind: type[HotloopError]) -> HotloopError:
    """As `cannot_write`, where it is not known that it was to be written; and not where it cannot even be read."""
    if error.errno == errno.EACCES and path.exists() and not os.access(path, os.R_OK):
        return kind(f"cannot read {path}", error.strerror or str(error), f"let this user read it: chmod u+r {path}")
    return cannot_write(path, error, kind)


def cannot_write(
    path: Path, error: OSError, kind: type[HotloopError], elsewhere: str = "of a run: --set run.dir=FOLDER"
) -> HotloopError:
    """Words for a failed write of `path`, as an error of the given kind.

    Args:
        elsewhere: what to type for another place.
    """
    fix = FIXES.get(error.errno or 0, "see that the disk is mounted and healthy, then start the same command again")
    if error.errno in _ANOTHER_PLACE:
        fix = f"{fix}; {elsewhere}"
    return kind(f"cannot write {path}", error.strerror or str(error), fix)
