"""A collector to send metrics to: it keeps what comes, decoded by OpenTelemetry's own types."""

import ssl
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import SimpleQueue
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)


@dataclass(frozen=True)
class Received:
    path: str
    headers: Mapping[str, str]
    request: ExportMetricsServiceRequest

    @property
    def resource(self) -> dict[str, str]:
        (one,) = self.request.resource_metrics
        return labels(one.resource)

    @property
    def metrics(self) -> dict[str, Any]:
        """By name."""
        (one,) = self.request.resource_metrics
        (scope,) = one.scope_metrics
        assert scope.scope.name == "hotloop"
        return {metric.name: metric for metric in scope.metrics}


def labels(of: Any) -> dict[str, str]:
    return {one.key: one.value.string_value for one in of.attributes}


def points(metric: Any) -> list[Any]:
    kind = metric.WhichOneof("data")
    assert kind in ("gauge", "sum")
    return list(getattr(metric, kind).data_points)


class Collector(ThreadingHTTPServer):
    """One on a free port of this machine.

    Attributes:
        answers: codes of the next answers; 200 after them.
        rejects: so many points, as it says.
        silent: answers nobody before it ends.
    """

    daemon_threads = True

    def __init__(self, port: int = 0, answers: Sequence[int] = (), rejects: int = 0, silent: bool = False) -> None:
        self.answers, self.rejects, self.silent = list(answers), rejects, silent
        self.received: SimpleQueue[Received] = SimpleQueue()
        self.ended = threading.Event()
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def next(self) -> Received:
        """Waits for what comes."""
        return self.received.get(timeout=60)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that does not trust it, or has ended."""


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        request = ExportMetricsServiceRequest.FromString(body)
        self.server.received.put(Received(self.path, self.headers, request))
        if self.server.silent:
            self.server.ended.wait()
            return
        code = self.server.answers.pop(0) if self.server.answers else 200
        answer = ExportMetricsServiceResponse()
        answer.partial_success.rejected_data_points = self.server.rejects
        content = answer.SerializeToString()
        self.send_response(code)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", str(len(content)))
        if 300 <= code < 400:
            self.send_header("Location", "/elsewhere")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@contextmanager
def collector(encrypted: ssl.SSLContext | None = None, **how: Any) -> Iterator[Collector]:
    with Collector(**how) as server:
        if encrypted:
            server.socket = encrypted.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.ended.set()
            server.shutdown()
            thread.join()
