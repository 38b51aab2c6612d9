"""HTTP for the pages, by the standard library: a few readers on one machine need nothing that has to be installed."""

import ipaddress
import socket
import sys
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from hotloop.core.errors import InputError
from hotloop.monitor.web.site import Answer, Site


class Server(ThreadingHTTPServer):
    """Answers GET and HEAD alone, each request on a thread of its own.

    Args:
        address: to listen at, with the port; 0: any that is free.

    Raises:
        InputError: it cannot listen there.
    """

    def __init__(self, address: tuple[str, int], site: Site) -> None:
        self.site = site
        self._open: set[socket.socket] = set()
        self.name = address[0]
        self.address_family = socket.AF_INET6 if ":" in self.name else socket.AF_INET
        try:
            super().__init__(address, _Handler)
        except OSError as error:
            raise InputError(
                f"cannot listen at {address[0]} port {address[1]}", error.strerror or str(error),
                "--port 0 takes a free one; --host 127.0.0.1 is this machine alone",
            ) from None  # fmt: skip

    @property
    def url(self) -> str:
        """Where it can be read."""
        host = f"[{self.name}]" if ":" in self.name else self.name
        return f"http://{host}:{self.server_address[1]}/"

    def server_bind(self) -> None:
        """Listen, without asking a name server for this machine's name."""
        TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give it a thread."""
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """It is answered."""
        self._open.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        """Listen no more; browsers keep connections in store, which nobody waits for."""
        super().server_close()
        for request in list(self._open):
            with suppress(OSError):  # it has just ended
                request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """A reader that has gone is no error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    def is_known(self, host: str) -> bool:
        """Whether a request's Host is this server: names of others may lead here too, and their pages must not read."""
        name = host.rpartition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
        return name.lower() in ("localhost", self.name.lower()) or _is_address(name)


class _Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = 30
    server_version, sys_version = "hotloop", ""

    def do_GET(self) -> None:
        self._send(self._answer())

    do_HEAD = do_GET  # noqa: N815  # as the standard library calls it

    def do_POST(self) -> None:
        self.close_connection = True  # what was sent is not read
        self._send(self.server.site.refuse(HTTPStatus.METHOD_NOT_ALLOWED, "These pages can be read alone."))

    do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_POST  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Nobody reads it."""

    def _answer(self) -> Answer:
        if not self.server.is_known(self.headers.get("Host", "")):
            why = "The request names another host. Open the address that was printed at the start."
            return self.server.site.refuse(HTTPStatus.MISDIRECTED_REQUEST, why)
        try:
            return self.server.site.answer(self.path)
        except OSError as error:
            why = f"{error.filename} cannot be read: {error.strerror}."
            return self.server.site.refuse(HTTPStatus.INTERNAL_SERVER_ERROR, why)

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.status)
        headers = {
            "Content-Type": answer.kind, "Content-Length": str(len(answer.content)), "Cache-Control": "no-store",
            "Content-Security-Policy": answer.policy, "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer", "Cross-Origin-Resource-Policy": "same-origin",
        }  # fmt: skip
        for name, value in headers.items():
            self.send_header(name, value)
        if answer.status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.content)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
