"""The exporter's HTTP server: few threads, small requests, no patience. Each connection serves one request."""

import base64
import ipaddress
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from http.client import LineTooLong
from http.server import BaseHTTPRequestHandler
from io import BufferedIOBase
from socketserver import TCPServer
from typing import Any, Protocol, cast

from prometheus_client.exposition import choose_encoder

from hotloop.monitor.ahead import Ahead
from hotloop.monitor.metrics import Metrics
from hotloop.monitor.passwords import Busy, Passwords
from hotloop.monitor.text import Text

_MOST_CONNECTIONS = 16
_MOST_BYTES = 16 * 1024
_MOST_FORMATS = 4
_LIMIT_SECONDS = 15.0
_PAGE = b"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>hotloop exporter</title>
<h1>hotloop exporter</h1>
<p><a href="metrics">Metrics</a> of this host's NVIDIA cards and of the trainings on them, for Prometheus.</p>
</html>
"""


class Guard(Protocol):
    """What holds for a new connection."""

    def current(self) -> tuple[ssl.SSLContext | None, Passwords | None]:
        """Encryption and passwords; None for none."""


class Server(TCPServer):
    """Serves metrics on one address.

    Args:
        address: a numeric one and a port, 0 for a free one.
        guard: None: everybody may read, unencrypted.
        limit_seconds: that a connection may take in all.

    Raises:
        OSError: the address cannot be listened on.
    """

    allow_reuse_address = True
    request_queue_size = 64

    def __init__(
        self, address: tuple[str, int], metrics: Metrics, guard: Guard | None = None,
        limit_seconds: float = _LIMIT_SECONDS, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.metrics, self._guard, self._limit, self._clock = metrics, guard, limit_seconds, clock
        self.address_family = socket.AF_INET6 if ipaddress.ip_address(address[0]).version == 6 else socket.AF_INET
        self._free = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        # They stay: to start a thread for each scrape costs more than what it does with HTTP.
        self._threads = ThreadPoolExecutor(_MOST_CONNECTIONS, "request")
        self._open: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        self.text_for = lru_cache(_MOST_FORMATS)(_text_for)
        self.ahead = Ahead(metrics, clock)
        self.ahead.start()
        super().__init__(address, _Handler)

    @property
    def url(self) -> str:
        """Where it can be read."""
        encrypted = self._guard and self._guard.current()[0]
        host, port = self.server_address[:2]
        name = f"[{host!s}]" if self.address_family == socket.AF_INET6 else str(host)
        return f"{'https' if encrypted else 'http'}://{name}:{port}/metrics"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give it a thread, if one is free."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        with self._lock:
            self._open[request] = self._clock() + self._limit
        self._threads.submit(self._serve, request, client_address)

    def server_close(self) -> None:
        """Listen no more, and end what is under way."""
        super().server_close()
        self._end(float("inf"))
        self._threads.shutdown()
        self.ahead.close()

    def _serve(self, request: Any, client_address: Any) -> None:
        """Serve a connection, and free the thread."""
        try:
            self.finish_request(request, client_address)
        except Exception:
            self.handle_error(request, client_address)
        finally:
            self.shutdown_request(request)
            with self._lock:
                self._open.pop(request, None)
            self._free.release()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Encrypt and answer."""
        context, passwords = self._guard.current() if self._guard else (None, None)
        request.settimeout(self._limit)
        if context:
            with context.wrap_socket(request, server_side=True, do_handshake_on_connect=False) as encrypted:
                with self._lock:  # the former object has given its socket away
                    self._open[encrypted] = self._open.pop(request)
                try:
                    encrypted.do_handshake()
                    _Handler(encrypted, client_address, self, passwords)
                finally:
                    with self._lock:
                        self._open.pop(encrypted, None)
        else:
            _Handler(request, client_address, self, passwords)

    def service_actions(self) -> None:
        """End connections that take too long, however often they send something. Twice a second."""
        self._end(self._clock())

    def _end(self, before: float) -> None:
        """End connections whose limit is before a time."""
        with self._lock:
            late = [one for one, until in self._open.items() if until < before]
        for one in late:
            with suppress(OSError):  # it has just ended
                socket.socket.shutdown(one, socket.SHUT_RDWR)  # below TLS, which another thread is in

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Connections end early every day, and strangers send what is no TLS; anything else is a mistake of ours."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Bounded:
    """The head of a request, up to a size."""

    def __init__(self, file: BufferedIOBase) -> None:
        self._file, self._left = file, _MOST_BYTES

    def readline(self, size: int = -1) -> bytes:
        line = self._file.readline(self._left + 1)
        self._left -= len(line)
        if self._left < 0:
            raise LineTooLong("head")
        return line

    def close(self) -> None:
        self._file.close()

    @property
    def closed(self) -> bool:
        return self._file.closed


class _Handler(BaseHTTPRequestHandler):
    server_version, sys_version = "hotloop", ""
    server: Server

    def __init__(self, request: Any, address: Any, server: Server, passwords: Passwords | None = None) -> None:
        self._passwords = passwords
        super().__init__(request, address, server)

    def setup(self) -> None:
        super().setup()
        self.rfile = cast(Any, _Bounded(self.rfile))

    def handle(self) -> None:
        self.requestline, self.command, self.request_version = "", "", self.protocol_version
        try:
            super().handle()
        except LineTooLong:
            self.send_error(431)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if not self._may():
            return
        if path == "/metrics":
            text, kind = self.server.text_for(self.headers.get("Accept", ""))
            self._answer(200, kind, self.server.ahead.page(text))
        elif path == "/healthz":
            self._answer(200, "text/plain; charset=utf-8", b"ok\n")
        elif path == "/":
            self._answer(200, "text/html; charset=utf-8", _PAGE)
        else:
            self._answer(404, "text/plain; charset=utf-8", b"not found; there are /metrics and /healthz\n")

    do_HEAD = do_GET  # noqa: N815

    def _may(self) -> bool:
        if self._passwords is None:
            return True
        name, password = _credentials(self.headers.get("Authorization", ""))
        if password is None:
            self._answer(401, "text/plain", b"a name and a password are needed\n")
            return False
        try:
            if self._passwords.are_right(name, password):
                return True
        except Busy:
            self._answer(429, "text/plain", b"too many passwords at a time\n")
            return False
        self.server.metrics.count_refused()
        self._answer(401, "text/plain", b"wrong name or password\n")
        return False

    def _answer(self, code: int, kind: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Security-Policy", "default-src 'none'")
        if code == 401:
            self.send_header("WWW-Authenticate", 'Basic realm="hotloop"')
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_request(self, code: Any = "-", size: Any = "-") -> None:
        self.server.metrics.count_request(int(code))

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: requests are counted."""


def _text_for(accept: str) -> tuple[Text, str]:
    """What writes metrics for one who accepts this, and the kind of what it writes."""
    encode, kind = choose_encoder(accept)
    return Text(encode), kind


def _credentials(header: str) -> tuple[str, str | None]:
    """Name and password; the password is None where there are none."""
    kind, _, coded = header.partition(" ")
    try:
        name, colon, password = base64.b64decode(coded.strip(), validate=True).decode().partition(":")
    except ValueError:
        return "", None
    return (name, password) if kind.lower() == "basic" and colon else ("", None)
