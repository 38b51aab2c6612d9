"""A real `hotloop exporter` to ask, and certificates for it."""

import os
import shutil
import signal
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True)
class Answer:
    code: int
    headers: Mapping[str, str]
    text: str


class Exporter:
    """One that runs.

    Args:
        errors: where its standard error goes.
    """

    def __init__(self, process: subprocess.Popen[str], url: str, errors: Path) -> None:
        self.process, self.url, self._errors = process, url, errors

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1].partition("/")[0])

    @property
    def errors(self) -> str:
        return self._errors.read_text()

    def ask(
        self, path: str = "/metrics", context: ssl.SSLContext | None = None, method: str = "GET",
        **headers: str,
    ) -> Answer:  # fmt: skip
        request = urllib.request.Request(self.url.removesuffix("/metrics") + path, headers=headers, method=method)
        handler = urllib.request.HTTPSHandler(context=context)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), handler)
        try:
            with opener.open(request, timeout=30) as answer:
                return Answer(answer.status, answer.headers, answer.read().decode())
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, error.headers, error.read().decode())

    def value(self, name: str, **labels: str) -> float | None:
        """The first series of a name with these labels."""
        return value(self.ask().text, name, **labels)


def value(text: str, name: str, /, **labels: str) -> float | None:
    """The first series of a name with these labels in a scrape."""
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            if one.name == name and labels.items() <= one.labels.items():
                return one.value
    return None


@contextmanager
def exporter(
    folder: Path, *options: str, environment: Mapping[str, str] | None = None, before: Sequence[str] = (),
    stop: int = signal.SIGTERM,
) -> Iterator[Exporter]:  # fmt: skip
    """One on a free port; ended by a signal, which it must take well.

    Args:
        folder: for what it writes.
        before: a command that starts it.
    """
    errors = folder / "exporter.err"
    command = [*before, sys.executable, "-W", "error", "-m", "hotloop", "exporter", "--port", "0", *options]
    live = {"HOTLOOP_LIVE": str(folder / "live")}
    with errors.open("w") as opened:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=opened, text=True,
            env={**os.environ, **live, **(environment or {})},
        )  # fmt: skip
    assert process.stdout
    try:
        with process.stdout:
            url = process.stdout.readline().strip()
            assert url.endswith("/metrics"), errors.read_text()
            yield Exporter(process, url, errors)
            process.send_signal(stop)
            assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


def certificate(folder: Path, name: str, issuer: str = "") -> None:
    """NAME.pem and NAME.key for 127.0.0.1; its own authority, or signed by another one that was made before."""
    signed = ["-CA", f"{issuer}.pem", "-CAkey", f"{issuer}.key"] if issuer else []
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "30",
         "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", f"{name}.key",
         "-out", f"{name}.pem", *signed],
        cwd=folder, check=True, capture_output=True,
    )  # fmt: skip


def no_openssl() -> str:
    """Why no certificate can be made; "" if one can."""
    return "" if shutil.which("openssl") else "the command openssl is not installed"
