"""Servers on this machine that speak some versions of TLS, and nothing that is worth hearing."""

import http.server
import select
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def https_server(
    certificate: Path, key: Path, newest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3,
    handler: type[http.server.BaseHTTPRequestHandler] = http.server.BaseHTTPRequestHandler,
) -> Iterator[str]:  # fmt: skip
    """Its address."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    context.maximum_version = newest
    server = _Quiet(("127.0.0.1", 0), handler)
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    with _served(server):
        yield f"https://127.0.0.1:{server.server_port}"


@contextmanager
def http_server(handler: type[http.server.BaseHTTPRequestHandler]) -> Iterator[str]:
    """Its address."""
    server = _Quiet(("127.0.0.1", 0), handler)
    with _served(server):
        yield f"http://127.0.0.1:{server.server_port}"


class Proxy(http.server.BaseHTTPRequestHandler):
    """Lets connections through, and counts them."""

    through: list[str]
    names: list[str | None]

    def do_CONNECT(self) -> None:
        self.through.append(self.path)
        self.names.append(self.headers["Proxy-Authorization"])
        host, port = self.path.split(":")
        with socket.create_connection((host, int(port)), timeout=10) as other:
            self.send_response(200)
            self.end_headers()
            ends = {self.connection: other, other: self.connection}
            while ready := select.select(list(ends), [], [], 10)[0]:
                for end in ready:
                    if not (content := end.recv(1 << 16)):
                        return
                    ends[end].sendall(content)

    def log_message(self, *_: object) -> None:
        pass


class _Quiet(http.server.ThreadingHTTPServer):
    daemon_threads = False

    def handle_error(self, *_: object) -> None:
        """A handshake that fails is what is tested."""


@contextmanager
def _served(server: http.server.ThreadingHTTPServer) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
