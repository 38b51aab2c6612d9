"""What a finished command left, and the type of the fixture that runs one."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from typing import Protocol

_READ_AT_START = ("PYTHON", "OMP_", "GOMP_", "KMP_", "MKL_", "CUDA_", "TORCH", "LD_", "MALLOC_", "LANG", "LC_")
"""Variables that a process reads when it starts: with others it is started anew."""


@dataclass(frozen=True)
class Finished:
    code: int
    out: str
    err: str


class Command(Protocol):
    def __call__(self, *arguments: str, expect: int | None = None, timeout: float = 120) -> Finished: ...


class Zygote:
    """Forks a process for each command from one that has imported torch; a context manager. See zygote.py.

    Args:
        environment: of the process that forks.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "Zygote":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process:
            self._process.communicate(timeout=60)

    def run(
        self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str], timeout: float
    ) -> Finished:  # fmt: skip
        """Run `hotloop ARGUMENTS` to its end.

        Raises:
            TimeoutError: it takes longer; it is killed.
        """
        changed = {key for key in environment.keys() | self._environment.keys() if self._differs(key, environment)}
        if any(key.startswith(_READ_AT_START) for key in changed) or "--version" in arguments:
            command = [sys.executable, "-W", "error", "-m", "hotloop", *arguments]
            child = subprocess.run(
                command, capture_output=True, text=True, cwd=folder, env=environment, timeout=timeout
            )  # fmt: skip
            return Finished(child.returncode, child.stdout, child.stderr)
        with tempfile.TemporaryDirectory() as name:
            out, err = Path(name) / "out", Path(name) / "err"
            request = {"arguments": list(arguments), "folder": str(folder), "environment": dict(environment)}
            code = self._forked({**request, "out": str(out), "err": str(err)}, timeout)
            return Finished(code, out.read_text(), err.read_text())

    def _differs(self, key: str, environment: Mapping[str, str]) -> bool:
        return environment.get(key) != self._environment.get(key)

    def _forked(self, request: dict[str, object], timeout: float) -> int:
        if not self._process:
            file = Path(__file__).with_name("zygote.py")
            self._process = subprocess.Popen(
                [sys.executable, "-W", "error", str(file)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self._environment,
            )  # fmt: skip
        assert self._process.stdin
        assert self._process.stdout
        print(json.dumps(request), file=self._process.stdin, flush=True)
        number = int(self._process.stdout.readline())
        late = Timer(timeout, os.kill, (number, signal.SIGKILL))
        late.start()
        try:
            code = int(self._process.stdout.readline())
        finally:
            late.cancel()
            late.join()
        if code == -signal.SIGKILL:
            raise TimeoutError(f"it took longer than {timeout} s: {request['arguments']}")
        return code
