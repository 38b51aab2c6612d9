"""The exporter as an OpenTelemetry collector meets it."""

import os
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import pytest
from command import Command
from exporter import Exporter, certificate, exporter, no_openssl
from ports import free_port

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="pip install 'hotloop[otlp]'")
from collector import collector, points

EVERY = ("--demo", "--otlp-every", "1", "--otlp")
SECRET = "k7Qx9"


def url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def pushes(running: Exporter, result: str) -> float:
    return running.value("hotloop_exporter_otlp_pushes_total", result=result) or 0


def test_all_is_sent_again_and_again_beside_the_page(tmp_path: Path) -> None:
    with collector() as there, exporter(tmp_path, *EVERY, url(there.port)) as running:
        first, second = there.next(), there.next()
        assert (first.path, first.headers["Content-Type"]) == ("/v1/metrics", "application/x-protobuf")
        assert first.resource["service.name"] == "hotloop-exporter"
        assert first.resource["host.name"] == first.resource["service.instance.id"] == socket.gethostname()
        assert {"hotloop_gpu_sm_active_ratio", "hotloop_job_steps_total"} <= set(first.metrics)
        steps = [points(one.metrics["hotloop_job_steps_total"])[0] for one in (first, second)]
        assert steps[0].time_unix_nano < steps[1].time_unix_nano
        assert steps[0].start_time_unix_nano == steps[1].start_time_unix_nano
        while not pushes(running, "sent"):
            pass
        assert running.value("hotloop_exporter_otlp_last_push_timestamp_seconds")
        assert pushes(running, "failed") == 0
    assert running.errors == ""


def test_once_sends_once(hotloop: Command) -> None:
    with collector() as there:
        done = hotloop("exporter", "--demo", "--once", "--otlp", url(there.port), expect=0)
        assert "hotloop_gpu_info" in done.out
        assert "hotloop_gpu_info" in there.next().metrics
        assert there.received.empty()


def test_what_the_environment_says_of_the_resource_comes_first(
    hotloop: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=lab,service.instance.id=rack-7")
    with collector() as there:
        hotloop("exporter", "--demo", "--once", "--otlp", url(there.port) + "/v1/metrics", expect=0)
        resource = there.next().resource
    assert resource["deployment.environment"] == "lab"
    assert (resource["service.name"], resource["service.instance.id"]) == ("hotloop-exporter", "rack-7")


def test_without_a_collector_the_page_is_served_until_one_comes(tmp_path: Path) -> None:
    port = free_port()
    environment = {"OTEL_EXPORTER_OTLP_TIMEOUT": "0.5"}
    with exporter(tmp_path, *EVERY, url(port), environment=environment) as running:
        while not pushes(running, "failed"):
            assert running.value("hotloop_exporter_build_info") == 1
        assert running.value("hotloop_exporter_otlp_last_push_timestamp_seconds") is None
        with collector(port=port) as there:
            there.next()
            while not pushes(running, "sent"):
                pass
            while "again" not in running.errors.splitlines()[-1]:
                pass
    where = f"{url(port)}/v1/metrics"
    assert running.errors.splitlines() == [
        f"warning: no metrics reach {where}: no connection; it is tried again",
        f"warning: metrics reach {where} again",
    ]


def test_a_collector_that_does_not_answer_holds_up_neither_the_page_nor_the_end(tmp_path: Path) -> None:
    environment = {"OTEL_EXPORTER_OTLP_TIMEOUT": "600"}
    with collector(silent=True) as there:
        with exporter(tmp_path, *EVERY, url(there.port), environment=environment) as running:
            there.next()
            assert running.ask().code == 200
        assert running.errors == ""


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ({"answers": [401]}, "it answers 401 Unauthorized"),
        ({"answers": [404]}, "it answers 404 Not Found"),
        ({"answers": [302]}, "it answers 302 Found"),
        ({"rejects": 3}, "it rejects 3 of the figures"),
    ],
)
def test_a_collector_that_refuses_is_quoted(how: dict[str, object], cause: str, hotloop: Command) -> None:
    with collector(**how) as there:
        done = hotloop("exporter", "--demo", "--once", "--otlp", url(there.port), expect=1)
    assert done.err.splitlines()[:2] == ["error: no metrics reach the collector", f"cause: {cause}"]
    assert len(done.err.splitlines()) == 3


def test_a_collector_that_is_busy_is_asked_again(hotloop: Command) -> None:
    with collector(answers=[503]) as there:
        hotloop("exporter", "--demo", "--once", "--otlp", url(there.port), expect=0)
        assert list(there.next().metrics) == list(there.next().metrics)


@pytest.mark.skipif(bool(no_openssl()), reason=no_openssl())
def test_headers_travel_encrypted_to_whom_the_certificate_names(
    hotloop: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate(tmp_path, "server")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.pem", tmp_path / "server.key")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"authorization=Bearer%20{SECRET}")
    with collector(encrypted=context) as there:
        to = ("exporter", "--demo", "--once", "--otlp", f"https://127.0.0.1:{there.port}")
        done = hotloop(*to, expect=1)
        assert "its certificate is not trusted" in done.err
        assert there.received.empty()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", str(tmp_path / "server.pem"))
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/nowhere.pem")
        hotloop(*to, expect=0)
        assert there.next().headers["authorization"] == f"Bearer {SECRET}"


def test_this_machine_is_reached_past_a_proxy_and_without_a_netrc(
    hotloop: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "netrc").write_text(f"machine 127.0.0.1 login me password {SECRET}\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("http_proxy", "http://192.0.2.1:3128")
    with collector() as there:
        hotloop("exporter", "--demo", "--once", "--otlp", url(there.port), expect=0)
        assert "Authorization" not in there.next().headers


@pytest.mark.parametrize(
    ("to", "environment", "what"),
    [
        ("127.0.0.1:4318", {}, "is not a URL"),
        ("grpc://127.0.0.1:4317", {}, "is not a URL"),
        ("http://", {}, "is not a URL"),
        ("", {}, "is not a URL"),
        ("http://127.0.0.1:http", {}, "is not a URL"),
        ("http://[127.0.0.1", {}, "is not a URL"),
        (f"https://me:{SECRET}@gpu-1", {}, "more than address and path"),
        (f"https://gpu-1/?token={SECRET}", {}, "more than address and path"),
        ("http://gpu-1:4318", {"HEADERS": f"a={SECRET}"}, "would send the headers"),
        ("http://gpu-1:4318", {"METRICS_HEADERS": f"a={SECRET}"}, "would send the headers"),
        ("https://gpu-1:4318", {"HEADERS": SECRET}, "cannot be used"),
        ("https://gpu-1:4318", {"TIMEOUT": "soon"}, "cannot be used"),
        ("https://gpu-1:4318", {"CERTIFICATE": "nowhere.pem"}, "'nowhere.pem' is no file"),
    ],
)
def test_what_cannot_be_sent_to_is_refused_in_three_lines_without_a_secret(
    to: str, environment: dict[str, str], what: str, hotloop: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{name}", value)
    done = hotloop("exporter", "--demo", "--once", "--otlp", to, expect=2)
    assert what in done.err
    assert [line[:5] for line in done.err.splitlines()] == ["error", "cause", "fix: "]
    assert SECRET not in done.err
    assert done.out == ""


def test_a_header_that_http_does_not_allow_stays_secret(hotloop: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"a={SECRET}%0Ab")
    with collector() as there:
        done = hotloop("exporter", "--demo", "--once", "--otlp", url(there.port), expect=1)
    assert "a header that HTTP does not allow" in done.err
    assert SECRET not in done.err


def test_without_the_library_it_says_what_to_install() -> None:
    code = "import sys; sys.modules['opentelemetry.exporter'] = None; from hotloop.cli.main import main; main()"
    command = [sys.executable, "-c", code, "exporter", "--demo", "--once", "--otlp", "http://127.0.0.1:4318"]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: --otlp needs hotloop[otlp]",
        "cause: opentelemetry.exporter.otlp is not installed",
        'fix:   pip install "hotloop[monitor,otlp]"',
    ]
