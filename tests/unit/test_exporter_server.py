"""The server gives nobody more than their share: of threads, of time and of memory."""

import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator

import pytest

from hotloop.monitor.demo import Demo
from hotloop.monitor.metrics import Metrics
from hotloop.monitor.server import Server

Start = Callable[..., Server]


@pytest.fixture
def serve() -> Iterator[Start]:
    """Starts servers on free ports of this machine, and ends them."""
    started: list[tuple[Server, threading.Thread]] = []

    def start(limit_seconds: float = 60.0) -> Server:
        server = Server(("127.0.0.1", 0), Metrics(Demo(now=lambda: 1e9)), limit_seconds=limit_seconds)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        started.append((server, thread))
        return server

    yield start
    for server, thread in started:
        server.shutdown()
        thread.join()
        server.server_close()


def connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(server.server_address[1])), timeout=30)


def ended(connection: socket.socket) -> bool:
    """Waits for the server to end it without an answer."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def ok(server: Server) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(server.url.replace("/metrics", "/healthz"), timeout=30) as answer:
        return bool(answer.read() == b"ok\n")


def test_a_client_that_says_nothing_is_left_after_a_while(serve: Start) -> None:
    server = serve(limit_seconds=0.05)
    with connect(server) as silent:
        assert ended(silent)


def test_a_client_that_speaks_a_letter_at_a_time_is_left_too(serve: Start) -> None:
    server = serve(limit_seconds=0.3)
    with connect(server) as slow:
        slow.settimeout(0.02)
        sent = 0
        while sent < 10_000:
            try:
                slow.send(b"G")
                sent += 1
                if slow.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        assert sent < 10_000


def test_so_many_connections_are_served_at_a_time_and_no_more(serve: Start) -> None:
    server = serve()
    silent = [connect(server) for _ in range(16)]
    try:
        with connect(server) as one_more:
            assert ended(one_more)
        silent.pop().close()
        tries = 0
        while True:  # until the thread of the one that left is free
            try:
                assert ok(server)
                break
            except OSError:
                tries += 1
                assert tries < 1000
    finally:
        for one in silent:
            one.close()


@pytest.mark.parametrize(
    "request_",
    [b"GET /" + b"a" * 20_000, b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 4000, b"GET / HTTP/1.1\r\nX: " + b"a" * 20_000],
)
def test_a_large_request_is_refused(request_: bytes, serve: Start) -> None:
    server = serve()
    with connect(server) as client:
        client.sendall(request_)
        answer = client.makefile("rb").readline()
    assert b"431" in answer
    assert ok(server)


@pytest.mark.parametrize(
    "request_", [b"\x00\xff\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01", b""]
)
def test_what_is_no_request_leaves_the_server_as_it_is(
    request_: bytes, serve: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    server = serve()
    with connect(server) as client:
        client.sendall(request_)
        client.shutdown(socket.SHUT_WR)
        client.recv(4096)
    assert ok(server)
    assert capsys.readouterr().err == ""


def test_a_server_that_ends_waits_for_nobody(serve: Start) -> None:
    server = serve(limit_seconds=3600.0)
    with connect(server) as silent, connect(server) as begun:
        begun.sendall(b"GET /healthz HTTP/1.1\r\n")
        assert ok(server)
        server.shutdown()
        server.server_close()
        assert ended(silent)
        assert ended(begun)
