"""`hotloop serve` in a process of its own, and requests as they are sent."""

import http.client
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    text: str


@dataclass(frozen=True)
class Served:
    """A server that listens.

    Attributes:
        address: what it printed, with a slash at the end.
    """

    process: "subprocess.Popen[str]"
    address: str

    @property
    def port(self) -> int:
        return int(self.address.rsplit(":", 1)[1].rstrip("/"))

    def get(self, target: str, method: str = "GET", **headers: str) -> Reply:
        """Ask for a path exactly as it is written."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.putrequest(method, target, skip_host="Host" in headers)
            for name, value in headers.items():
                connection.putheader(name, value)
            connection.endheaders()
            answer = connection.getresponse()
            return Reply(answer.status, dict(answer.getheaders()), answer.read().decode())
        finally:
            connection.close()


@contextmanager
def served(root: Path, live: Path) -> Iterator[Served]:
    """Serve a folder of runs, and what a folder tells of live trainings."""
    command = [sys.executable, "-W", "error", "-m", "hotloop", "serve", "--root", str(root), "--port", "0"]
    environment = {**os.environ, "HOTLOOP_LIVE": str(live)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout
        try:
            yield Served(process, process.stdout.readline().strip())
        finally:
            process.terminate()
