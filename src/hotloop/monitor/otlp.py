"""The same metrics for an OpenTelemetry collector: OTLP over HTTP, by the official library, sent again and again.

Names stay those of the scrape page, so that rules and dashboards hold for both; Prometheus, whose way of naming they
follow, takes units and kinds from OTLP and gets the same names.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import requests
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Metric,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from hotloop import __version__
from hotloop.core.errors import InputError
from hotloop.monitor.families import PREFIX, Family
from hotloop.monitor.loopback import is_loopback
from hotloop.monitor.metrics import Metrics

EXAMPLE = "--otlp http://127.0.0.1:4318"
_PATH = "/v1/metrics"
_VARIABLE = "OTEL_EXPORTER_OTLP_"
_UNITS = {
    "seconds": "s", "bytes": "By", "ratio": "1", "watts": "W", "joules": "J", "celsius": "Cel", "hertz": "Hz",
}  # fmt: skip
"""As OpenTelemetry writes them, by the last word of a name."""
_JOB_START = "job_start_timestamp_seconds"
_ENDING_SECONDS = 1.0
_TROUBLES: tuple[tuple[type[Exception], str], ...] = (
    (requests.exceptions.SSLError, f"its certificate is not trusted; {_VARIABLE}CERTIFICATE names who signs it"),
    (requests.exceptions.ProxyError, "the proxy that the environment names does not let it through"),
    (requests.exceptions.Timeout, "no answer in time"),
    (requests.exceptions.ConnectionError, "no connection"),
    (requests.exceptions.InvalidHeader, f"{_VARIABLE}HEADERS has a header that HTTP does not allow"),
)


class Starts:
    """When totals began, as OTLP tells it beside each: a job's with its process; another's when it was first seen, or
    when it fell.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[str, tuple[str, ...]], tuple[int, float]] = {}

    def of(self, families: Iterable[Family], now: int) -> dict[tuple[str, tuple[str, ...]], int]:
        """By name and labels' values; times are nanoseconds since 1970."""
        families = tuple(families)
        jobs = {who: int(at * 1e9) for one in families if one.name == _JOB_START for who, at in one.rows}
        former, self._seen = self._seen, {}
        for family in families:
            for values, number in family.rows if _is_total(family) else ():
                key = (family.name, values)
                start, before = former.get(key, (now, number))
                start = start if number >= before else now
                if family.name.startswith("job_"):
                    start = jobs.get(values, start)
                start = min(start, now)  # the clock may have been set back
                self._seen[key] = (start, number)
        return {key: start for key, (start, _) in self._seen.items()}


def metrics_data(families: Sequence[Family], resource: Resource, starts: Starts, now: int) -> MetricsData:
    """Families as OpenTelemetry has them: what ends like a total is a monotonic sum, all else a gauge."""
    begun = starts.of(families, now)

    def data(family: Family) -> Gauge | Sum:
        points = [
            NumberDataPoint(dict(zip(family.labels, values, strict=True)), begun.get((family.name, values), 0), now,
                            float(number))
            for values, number in family.rows
        ]  # fmt: skip
        return Sum(points, AggregationTemporality.CUMULATIVE, True) if _is_total(family) else Gauge(points)

    made = [Metric(PREFIX + one.name, one.words, _unit(one.name), data(one)) for one in families]
    scope = ScopeMetrics(InstrumentationScope("hotloop", __version__), made, "")
    return MetricsData([ResourceMetrics(resource, [scope], "")])


def _is_total(family: Family) -> bool:
    return family.name.endswith("_total")


def _unit(name: str) -> str:
    return _UNITS.get(name.removesuffix("_total").rpartition("_")[2], "")


def endpoint(url: str) -> str:
    """Where metrics go, of a collector's URL.

    Raises:
        InputError: it is none, or what must stay secret would travel readably.
    """
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port
    except ValueError:
        raise InputError("--otlp is not a URL", "its host or port cannot be read", EXAMPLE) from None
    if "@" in url or parts.query or parts.fragment:
        cause = "who lists processes would read passwords and tokens in it"
        raise InputError("--otlp has more than address and path", cause, f"{_VARIABLE}HEADERS=authorization=...")
    if parts.scheme not in ("http", "https") or not host:
        raise InputError(f"--otlp {url!r} is not a URL", "http:// or https:// and a host are needed", EXAMPLE)
    if parts.scheme == "http" and not is_loopback(host) and _given("HEADERS"):
        raise InputError(
            f"--otlp {url!r} would send the headers of {_VARIABLE}HEADERS readably",
            f"{host} is not this machine, and http:// does not encrypt",
            f"--otlp https://{host}:{parts.port or 4318}",
        )
    return url if parts.path.endswith(_PATH) else url.rstrip("/") + _PATH


def travels_readably(url: str) -> str:
    """The other machine that metrics reach unencrypted; empty if they do not."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    return host if parts.scheme == "http" and not is_loopback(host) else ""


def _given(name: str) -> str:
    """The value of a variable of OpenTelemetry's; that for metrics alone comes first."""
    return os.environ.get(f"{_VARIABLE}METRICS_{name}") or os.environ.get(_VARIABLE + name, "")


class Pusher:
    """Sends metrics to a collector on a thread of its own while it is entered. Reading is never held up by sending.

    What the environment says of OTLP holds: certificates, headers, timeout, compression, the resource's attributes.

    Args:
        url: of the collector.
        metrics: to send; it counts what came of it.
        every_seconds: from one time to the next.
        warn: told in a line when sending begins to fail, and when it works again.

    Raises:
        InputError: the URL or the environment's settings cannot be used.
    """

    def __init__(self, url: str, metrics: Metrics, every_seconds: float, warn: Callable[[str], None]) -> None:
        self._metrics, self._every, self._warn = metrics, every_seconds, warn
        self._endpoint = endpoint(url)
        self._session = _Session(self._endpoint)
        self._exporter = _exporter(self._endpoint, self._session)
        name = socket.gethostname()
        own = {"service.name": "hotloop-exporter", "service.version": __version__, "service.instance.id": name}
        self._resource = Resource({**own, "host.name": name}).merge(OTELResourceDetector().detect())
        self._starts = Starts()
        self._failing = False
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="otlp", daemon=True)

    def push(self) -> str:
        """Send once, with the library's retries. Returns why it failed; empty if it did not."""
        families = list(self._metrics.families())
        self._session.trouble = ""
        sent = self._exporter.export(metrics_data(families, self._resource, self._starts, time.time_ns()))
        ok = sent is MetricExportResult.SUCCESS
        self._metrics.count_push(ok)
        return "" if ok else self._session.trouble or "it could not be sent"

    def __enter__(self) -> "Pusher":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._exporter.shutdown()  # ends waiting for the next try
        self._thread.join(_ENDING_SECONDS)

    def _run(self) -> None:
        while not self._end.is_set():
            begun = time.monotonic()
            trouble = self.push()
            if self._end.is_set():
                return
            if trouble and not self._failing:
                self._warn(f"no metrics reach {self._endpoint}: {trouble}; it is tried again")
            elif self._failing and not trouble:
                self._warn(f"metrics reach {self._endpoint} again")
            self._failing = bool(trouble)
            self._end.wait(max(0.0, self._every - (time.monotonic() - begun)))


class _Session(requests.Session):
    """Takes nothing from the environment but proxies, and these not for this machine: no passwords of a .netrc, no
    other certificates than OpenTelemetry's variables name.

    Attributes:
        trouble: what went wrong last, in words without a header or an address.
    """

    def __init__(self, url: str) -> None:
        super().__init__()
        self.trouble = ""
        self.trust_env = False
        if not is_loopback(urlsplit(url).hostname or ""):
            self.proxies.update(requests.utils.get_environ_proxies(url))

    def request(self, *arguments: Any, **options: Any) -> requests.Response:
        try:
            response = super().request(*arguments, **options)
        except Exception as error:
            self.trouble = next((words for kind, words in _TROUBLES if isinstance(error, kind)), type(error).__name__)
            raise
        self.trouble = _refused(response)
        if self.trouble and response.status_code < 400:  # the library takes these for a success
            raise requests.RequestException(self.trouble)
        return response


def _refused(response: requests.Response) -> str:
    """Why a collector has not taken all; empty if it has."""
    code = response.status_code
    if not 200 <= code < 300:
        known = code in HTTPStatus._value2member_map_
        return f"it answers {code} {HTTPStatus(code).phrase if known else ''}".strip()
    if response.headers.get("Content-Type", "").startswith("application/x-protobuf"):
        rejected = ExportMetricsServiceResponse.FromString(response.content).partial_success.rejected_data_points
        return f"it rejects {rejected} of the figures" if rejected else ""
    return ""


class _Told(logging.Handler):
    """Keeps the words of the library's warnings without their values: it logs headers."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.words.append(str(record.msg).partition("%")[0].strip(" :"))


def _exporter(url: str, session: requests.Session) -> OTLPMetricExporter:
    """The library's, silenced.

    Raises:
        InputError: a variable cannot be used.
    """
    for name in ("CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY"):
        file = _given(name)
        if file and not Path(file).is_file():
            raise InputError(f"{_VARIABLE}{name} {file!r} is no file", "it is to hold a PEM", "name one, or unset it")
    told = _Told()
    logger = logging.getLogger("opentelemetry")
    logger.propagate = False
    logger.handlers = [told]
    exporter = OTLPMetricExporter(endpoint=url, session=session)
    logger.handlers = [logging.NullHandler()]
    if told.words:
        fix = "docs/exporter.md, `To an OpenTelemetry collector`, has how they are written"
        raise InputError(f"a variable {_VARIABLE}... cannot be used", told.words[0], fix)
    return exporter
