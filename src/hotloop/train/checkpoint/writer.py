"""The process that writes checkpoints while the training goes on; no torch, so that it starts in 0.1 s.

It maps the memory that the state was copied into, and reads a request a line: {"size", "temporary", "share", "files",
"plan"}. Its answer is a line, too: {} or {"errno", "text"}.
"""

import ctypes
import json
import mmap
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hotloop.train.checkpoint.files import Plan, Share, is_incomplete, share_file, write_checkpoint

_PR_SET_PDEATHSIG = 1
"""<sys/prctl.h>"""
_DEAF_TO = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""They mean the training, which tells us when it ends."""
_END_SECONDS, _MOST_SECONDS, _LOOK_SECONDS = 10.0, 600.0, 0.02
"""For what is left once this process's share is written; for a disk that stands still."""


@dataclass(frozen=True)
class Request:
    """A share to be written.

    Attributes:
        temporary: the folder that becomes the checkpoint.
        files: for each name, place and size of its content's blocks in the memory, in bytes.
        plan: for the process that makes one checkpoint of the shares.
    """

    temporary: str
    share: Share
    files: dict[str, list[tuple[int, int]]]
    plan: Plan | None


def carry_out(request: Request, memory: memoryview) -> None:
    """Write a share, and publish the checkpoint if that is asked for.

    Raises:
        OSError: it was not possible.
    """
    content = {name: [memory[start : start + size] for start, size in blocks] for name, blocks in request.files.items()}
    write_checkpoint(Path(request.temporary), request.share, content, request.plan)


class Writer:
    """Such a process, started when there is something to write."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._request: Request | None = None

    def begin(self, request: Request, descriptor: int, size_bytes: int) -> None:
        """Have a share written from memory; one at a time."""
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = subprocess.Popen(  # noqa: S603, it is this module
                [sys.executable, "-P", "-m", __name__, str(descriptor), str(os.getpid())],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[descriptor],
            )  # fmt: skip
        self._request = request
        assert self._process.stdin
        with suppress(BrokenPipeError):  # it has ended: `answered` sees that
            self._process.stdin.write(json.dumps({"size": size_bytes, **asdict(request)}).encode() + b"\n")
            self._process.stdin.flush()

    def answered(self, memory: memoryview, wait: bool) -> bool:
        """Whether it is done.

        If the process was killed, this one does its work.

        Raises:
            OSError: it was not possible.
        """
        process, request = self._process, self._request
        assert request
        if process:
            assert process.stdout
            if not wait and not _has_something(process.stdout.fileno()):
                return False
            line = process.stdout.readline()
            if line.endswith(b"\n"):
                self._request = None
                if answer := json.loads(line):
                    raise OSError(answer["errno"], answer["text"])
                return True
            self.close()
        if not _is_done(request):
            if not wait and request.plan and is_incomplete(Path(request.temporary), request.share.of):
                return False  # its rank may wait for this one in a step
            carry_out(request, memory)
        self._request = None
        return True

    def close(self) -> None:
        """End the process, once it has written what it has begun."""
        if self._process is None:
            return
        assert self._process.stdin
        assert self._process.stdout
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        began = quiet = time.monotonic()
        while self._process.poll() is None:
            now = time.monotonic()
            quiet = now if self._is_writing() else quiet
            if now > min(quiet + _END_SECONDS, began + _MOST_SECONDS):
                self._process.kill()
            time.sleep(_LOOK_SECONDS)
        self._process.stdout.close()
        self._process = None

    def _is_writing(self) -> bool:
        """Whether this rank's share is on its way to the disk; the others' may never come."""
        if not self._request:
            return False
        temporary = Path(self._request.temporary)
        return temporary.exists() and not share_file(temporary, self._request.share.number).exists()


def _has_something(descriptor: int) -> bool:
    """Whether there is something to read, or the end. Not by select(), which takes no descriptor of 1,024 and more."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def _is_done(request: Request) -> bool:
    """Whether what a killed process was asked for is there. A share must not be written anew then: the first process
    makes the checkpoint of it meanwhile, or has given up and tells why.
    """
    temporary = Path(request.temporary)
    if request.plan:
        return Path(request.plan.path).exists() and not temporary.exists()
    return share_file(temporary, request.share.number).exists() or not temporary.exists()


def main(descriptor: int, parent: int) -> None:
    """Serve until nobody can ask any more."""
    for number in _DEAF_TO:
        signal.signal(number, signal.SIG_IGN)
    # What a killed training has left half written is removed by the one that goes on: it must not grow meanwhile.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        return
    for line in sys.stdin:
        asked: dict[str, Any] = json.loads(line)
        with mmap.mmap(descriptor, asked.pop("size"), prot=mmap.PROT_READ) as memory, memoryview(memory) as view:
            answer = _answer(asked, view)
        print(json.dumps(answer), flush=True)  # noqa: T201


def _answer(asked: dict[str, Any], memory: memoryview) -> dict[str, Any]:
    plan = Plan(**asked["plan"]) if asked["plan"] else None
    request = Request(asked["temporary"], Share(**asked["share"]), asked["files"], plan)
    try:
        carry_out(request, memory)
    except OSError as error:
        return {"errno": error.errno, "text": error.strerror or str(error)}
    return {}


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
