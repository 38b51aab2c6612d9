"""The exporter as Prometheus meets it: over HTTP and TLS, by passwords and from other networks."""

import base64
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import urllib.error
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from command import Command
from exporter import Exporter, certificate, exporter, no_openssl, value
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from hotloop.core.live import Publisher

bcrypt = pytest.importorskip("bcrypt", reason="pip install 'hotloop[monitor]'")
STUB = Path(__file__).parents[2] / "bench/stub_nvml.c"
MACHINE = Path(__file__).parents[1] / "support/machines/h200.json"
needs_openssl = pytest.mark.skipif(bool(no_openssl()), reason=no_openssl())


def basic(name: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()


def hashed(password: str) -> str:
    made: bytes = bcrypt.hashpw(password.encode(), bcrypt.gensalt(4))
    return made.decode()


def trusting(pem: Path, newest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(pem))
    context.maximum_version = newest
    return context


def test_once_prints_the_metrics_and_ends(hotloop: Command) -> None:
    finished = hotloop("exporter", "--demo", "--once", expect=0)
    names = {family.name for family in parse(finished.out)}
    assert {"hotloop_gpu_sm_active_ratio", "hotloop_job_data_wait_seconds", "hotloop_exporter_build_info"} <= names
    assert finished.err == ""


def test_once_as_json_is_one_object_with_the_same_samples(hotloop: Command) -> None:
    samples = json.loads(hotloop("exporter", "--demo", "--once", "--json", expect=0).out)["samples"]
    text = hotloop("exporter", "--demo", "--once", expect=0).out
    assert {one["name"] for one in samples} == {one.name for family in parse(text) for one in family.samples}
    assert {"name": "hotloop_gpu_nvlinks", "value": 18.0} in [
        {key: one[key] for key in ("name", "value")} for one in samples
    ]


def test_a_demo_of_a_saved_machine_shows_its_cards(hotloop: Command) -> None:
    out = hotloop("exporter", "--demo", "--machine", str(MACHINE), "--once", expect=0).out
    for gpu in json.loads(MACHINE.read_text())["gpus"]:
        assert value(out, "hotloop_gpu_info", uuid=gpu["uuid"]) == 1


def test_this_machine_is_read_with_or_without_cards(hotloop: Command) -> None:
    out = hotloop("exporter", "--once", expect=0).out
    assert value(out, "hotloop_exporter_collect_failures_total", source="jobs") == 0


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_it_answers_this_machine_and_ends_when_asked_to(tmp_path: Path, stop: int) -> None:
    with exporter(tmp_path, "--demo", stop=stop) as running:
        assert running.url.startswith("http://127.0.0.1:")
        answer = running.ask()
        assert (answer.code, answer.headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
        assert len(list(parse(answer.text))) > 50
        opened = running.ask(Accept="application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.1")
        assert opened.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
        assert len(list(parse_openmetrics(opened.text))) > 50
        assert running.ask("/healthz").text == "ok\n"
        assert 'href="metrics"' in running.ask("/").text
        assert running.ask("/secret").code == 404
        assert running.ask(method="HEAD").text == ""
        assert running.ask(method="POST").code == 501
        assert running.ask(X="a" * 20_000).code == 431
        assert running.value("hotloop_exporter_requests_total", code="404") == 1
        assert running.value("hotloop_exporter_requests_total", code="431") == 1
    assert running.errors == ""


def test_a_training_on_this_machine_is_seen_while_it_runs(tmp_path: Path) -> None:
    with exporter(tmp_path) as running:
        publisher = Publisher(tmp_path / "live", way="library", job="mine", run="runs/mine-3")
        publisher.stepped(2.0, 0.5, samples=8, steps=4)
        publisher.write()
        who = {"job_name": "mine", "run": "mine-3", "rank": "0"}
        assert running.value("hotloop_job_data_wait_seconds_total", **who) == 0.5
        publisher.close()
        wait_fresh(running, "hotloop_job_info")


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler for the stub of NVML")
def test_the_real_pynvml_is_understood(tmp_path: Path) -> None:
    library = tmp_path / "libnvidia-ml.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, STUB], check=True)
    with exporter(tmp_path, environment={"LD_LIBRARY_PATH": str(tmp_path)}) as running:
        first = running.ask().text
        assert value(first, "hotloop_gpu_sm_active_ratio") is None
        while (active := running.value("hotloop_gpu_sm_active_ratio", gpu="7")) is None:
            pass  # a reading serves for half a second
        assert active == 0.42
    who = {"uuid": "GPU-00000000-0000-4000-8000-000000000007", "gpu": "7"}
    assert value(first, "hotloop_driver_info", version="580.159.04", cuda="13.0") == 1
    assert value(first, "hotloop_gpu_info", **who, bus_id="00000000:20:00.0", mig="off") == 1
    assert value(first, "hotloop_gpu_memory_used_bytes", **who) == 120 << 30
    assert value(first, "hotloop_gpu_temperature_celsius", **who, sensor="memory") == 67
    assert value(first, "hotloop_gpu_throttled", **who, reason="power_cap") == 1
    assert value(first, "hotloop_gpu_nvlinks_active", **who) == 18
    assert value(first, "hotloop_gpu_processes", **who) == 1
    assert (value(first, "hotloop_gpu_nvlink_receive_bytes_total", **who) or 0) > 1e12
    assert value(first, "hotloop_exporter_collect_failures_total", source="cards") == 0


def wait_fresh(running: Exporter, name: str) -> None:
    """Asks until a series has gone: a reading serves for half a second."""
    for _ in range(2000):
        if running.value(name) is None:
            return
    raise AssertionError(f"{name} is still there")


@contextmanager
def configured(folder: Path, content: object, *options: str, before: Sequence[str] = ()) -> Iterator[Exporter]:
    (folder / "web.yml").write_text(json.dumps(content))
    with exporter(folder, "--demo", "--web-config", str(folder / "web.yml"), *options, before=before) as running:
        yield running


@needs_openssl
def test_tls_13_is_served_and_12_is_not(tmp_path: Path) -> None:
    certificate(tmp_path, "server")
    with configured(tmp_path, {"tls_server_config": {"cert_file": "server.pem", "key_file": "server.key"}}) as running:
        assert running.url.startswith("https://127.0.0.1:")
        assert running.ask(context=trusting(tmp_path / "server.pem")).code == 200
        with pytest.raises(urllib.error.URLError, match=r"(?i)protocol.version"):
            running.ask(context=trusting(tmp_path / "server.pem", ssl.TLSVersion.TLSv1_2))
        with pytest.raises(urllib.error.URLError, match="certificate verify failed"):
            running.ask(context=ssl.create_default_context())
        with socket.create_connection(("127.0.0.1", running.port)) as plain, suppress(ConnectionError):
            plain.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert b"200" not in plain.recv(4096)
        assert running.ask(context=trusting(tmp_path / "server.pem")).code == 200
    assert running.errors == ""


@needs_openssl
def test_tls_12_is_served_where_it_is_asked_for(tmp_path: Path) -> None:
    certificate(tmp_path, "server")
    tls = {"cert_file": "server.pem", "key_file": "server.key", "min_version": "TLS12"}
    with configured(tmp_path, {"tls_server_config": tls}) as running:
        assert running.ask(context=trusting(tmp_path / "server.pem", ssl.TLSVersion.TLSv1_2)).code == 200


@needs_openssl
def test_clients_without_a_certificate_are_refused_where_one_is_required(tmp_path: Path) -> None:
    for name in ("server", "client"):
        certificate(tmp_path, name)
    tls = {"cert_file": "server.pem", "key_file": "server.key", "client_ca_file": "client.pem"}
    content = {"tls_server_config": {**tls, "client_auth_type": "RequireAndVerifyClientCert"}}
    with configured(tmp_path, content) as running:
        context = trusting(tmp_path / "server.pem")
        with pytest.raises((ssl.SSLError, urllib.error.URLError, ConnectionError)):
            running.ask(context=context)
        context.load_cert_chain(tmp_path / "client.pem", tmp_path / "client.key")
        assert running.ask(context=context).code == 200


def test_a_wrong_password_is_refused_and_counted(tmp_path: Path) -> None:
    with configured(tmp_path, {"basic_auth_users": {"prometheus": hashed("right")}}) as running:
        for path in ("/metrics", "/healthz", "/"):
            assert running.ask(path).code == 401
        assert running.ask(Authorization="Basic !!").code == 401
        assert running.ask(Authorization=basic("prometheus", "wrong")).code == 401
        refused = running.ask(Authorization=basic("other", "right"))
        assert (refused.code, refused.headers["WWW-Authenticate"]) == (401, 'Basic realm="hotloop"')
        answer = running.ask(Authorization=basic("prometheus", "right"))
        assert answer.code == 200
        assert value(answer.text, "hotloop_exporter_authentication_failures_total") == 2
        assert value(answer.text, "hotloop_exporter_requests_total", code="401") == 6


@needs_openssl
def test_certificates_and_passwords_are_renewed_while_it_runs(tmp_path: Path) -> None:
    certificate(tmp_path, "server")
    tls = {"cert_file": "server.pem", "key_file": "server.key"}
    with configured(tmp_path, {"tls_server_config": tls}) as running:
        former = trusting(tmp_path / "server.pem")
        assert running.ask(context=former).code == 200
        certificate(tmp_path, "newer")
        for suffix in ("key", "pem"):
            (tmp_path / f"newer.{suffix}").replace(tmp_path / f"server.{suffix}")
        assert running.ask(context=trusting(tmp_path / "server.pem")).code == 200
        with pytest.raises(urllib.error.URLError, match="certificate verify failed"):
            running.ask(context=former)
        (tmp_path / "web.yml").write_text("basic_auth_users: {a: unhashed}")
        assert running.ask(context=trusting(tmp_path / "server.pem")).code == 200, "the former stays"
        assert "the former stays" in running.errors
        assert "unhashed" not in running.errors
        content = {"tls_server_config": tls, "basic_auth_users": {"a": hashed("b")}}
        (tmp_path / "web.yml").write_text(json.dumps(content))
        assert running.ask(context=trusting(tmp_path / "server.pem")).code == 401


@pytest.fixture
def two_hosts() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a cable between them; the first has the address 192.0.2.1, the second 192.0.2.2."""
    names = (f"hotloop-a-{os.getpid()}", f"hotloop-b-{os.getpid()}")
    commands = [f"netns add {name}" for name in names]
    commands.append(f"link add one netns {names[0]} type veth peer name one netns {names[1]}")
    for number, name in enumerate(names, 1):
        commands.append(f"-n {name} address add 192.0.2.{number}/24 dev one")
        commands += [f"-n {name} link set {device} up" for device in ("lo", "one")]
    try:
        for command in commands:
            try:
                subprocess.run(["ip", *command.split()], check=True, capture_output=True, text=True)
            except (OSError, subprocess.CalledProcessError) as error:
                reason = getattr(error, "stderr", "") or str(error)
                pytest.skip(f"no network namespaces can be made here: ip {command}: {reason.strip()}")
        yield names
    finally:
        for name in names:
            try:
                subprocess.run(["ip", "netns", "delete", name], capture_output=True)
            except OSError:
                break


ASK = "import urllib.request as u; print(u.urlopen('http://192.0.2.1:{port}/healthz', timeout=20).read().decode())"


def ask_from(namespace: str, port: int) -> subprocess.CompletedProcess[str]:
    command = ["ip", "netns", "exec", namespace, "python3", "-c", ASK.format(port=port)]
    environment = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_another_host_is_refused_unless_it_is_asked_for(two_hosts: tuple[str, str], tmp_path: Path) -> None:
    here, there = two_hosts
    inside = ["ip", "netns", "exec", here]
    with exporter(tmp_path, "--demo", before=inside) as running:
        assert "Connection refused" in ask_from(there, running.port).stderr
    with exporter(tmp_path, "--demo", "--listen", "192.0.2.1:9400", before=inside) as running:
        assert ask_from(there, running.port).stdout.strip() == "ok"
        assert running.errors.startswith("warning: 192.0.2.1 is open to the network: everybody")


@needs_openssl
@pytest.mark.parametrize(
    ("parts", "told"),
    [((), "everybody"), (("tls",), "everybody"), (("users",), "passwords travel readably"), (("tls", "users"), "")],
)
def test_an_open_address_is_warned_of_by_what_it_lacks(
    parts: tuple[str, ...], told: str, two_hosts: tuple[str, str], tmp_path: Path
) -> None:
    certificate(tmp_path, "server")
    whole: dict[str, object] = {
        "tls": {"tls_server_config": {"cert_file": "server.pem", "key_file": "server.key"}},
        "users": {"basic_auth_users": {"a": hashed("b")}},
    }
    content = {key: value for part in parts for key, value in dict(whole[part]).items()}  # type: ignore[call-overload]
    inside = ["ip", "netns", "exec", two_hosts[0]]
    with configured(tmp_path, content, "--listen", "0.0.0.0:9400", before=inside) as running:
        assert told in running.errors
        assert bool(running.errors) == bool(told)


def test_a_web_config_that_keeps_nobody_out_is_said(tmp_path: Path) -> None:
    """At the start, and when it becomes so."""
    told = "warning: --web-config {} asks for neither TLS nor a password: whoever connects can read\n"
    with configured(tmp_path, {}) as running:
        assert running.ask().code == 200
        assert running.errors == told.format(tmp_path / "web.yml")
    with configured(tmp_path, {"basic_auth_users": {"a": hashed("b")}}) as running:
        assert running.ask().code == 401
        assert running.errors == ""
        (tmp_path / "web.yml").write_text("# nobody\n")
        assert running.ask().code == 200
        assert running.errors == told.format(tmp_path / "web.yml")


HASH = "$2y$10$" + "a" * 53


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (None, "No such file or directory"),
        ("a: [", "is no YAML"),
        ("- a", "file: "),
        ("tls_config: {}", "tls_config: Extra inputs"),
        ("basic_auth_users: {a: secret}", "basic_auth_users.a: "),
        ("basic_auth_users: {a: 1}", "basic_auth_users.a: "),
        ("tls_server_config: {cert_file: a}", "tls_server_config.key_file: Field required"),
        ("tls_server_config: {cert_file: a, key_file: b}", "a, b cannot be used"),
        ("tls_server_config: {cert_file: web.yml, key_file: web.yml}", "cannot be used"),
        ("tls_server_config: {cert_file: a, key_file: b, min_version: TLS10}", "tls_server_config.min_version: "),
        ("tls_server_config: {cert_file: a, key_file: b, client_ca_file: c}", "go together"),
        (
            "tls_server_config: {cert_file: a, key_file: b, client_auth_type: RequestClientCert}",
            "tls_server_config.client_auth_type: ",
        ),
        (f"basic_auth_users: {{a: '{HASH}'}}\nhttp_server_config: {{http2: true}}", "http_server_config: "),
    ],
)
def test_a_web_config_that_cannot_be_used(content: str | None, cause: str, tmp_path: Path, hotloop: Command) -> None:
    if content is not None:
        (tmp_path / "web.yml").write_text(content)
    error = hotloop("exporter", "--demo", "--port", "0", "--web-config", "web.yml", expect=2).err
    assert cause in error
    assert [line.split(":")[0] for line in error.splitlines()] == ["error", "cause", "fix"]
    assert "secret" not in error


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--listen", "9400"], "--listen '9400' is not ADDRESS:PORT"),
        (["--listen", ":9400"], "--listen ':9400' is not ADDRESS:PORT"),
        (["--listen", "127.0.0.1:99999"], "is not ADDRESS:PORT"),
        (["--listen", "127.0.0.1:http"], "is not ADDRESS:PORT"),
        (["--listen", "a..b:9400"], "no address a..b"),
        (["--listen", "192.0.2.77:9400"], "cannot listen on 192.0.2.77 port 9400"),
        (["--port", "70000"], "70000 is not in the range"),
        (["--json"], "--json needs --once"),
        (["--machine", "m.json"], "--machine needs --demo"),
        (["--demo", "--machine", "m.json"], "cannot read m.json"),
        (["more"], "unexpected extra argument"),
    ],
)
def test_what_is_typed_wrongly_is_told(arguments: list[str], told: str, hotloop: Command) -> None:
    finished = hotloop("exporter", *arguments, expect=2)
    assert told in finished.err
    assert [line.split(":")[0] for line in finished.err.splitlines()] == ["error", "cause", "fix"]


def test_where_its_address_cannot_be_told_it_ends(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "hotloop", "exporter", "--demo", "--port", "0"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "No space left on device" in done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_metrics_of_which_a_part_fits_are_no_success(tmp_path: Path, unbuffered: str) -> None:
    limited = ["bash", "-c", 'ulimit -f 16; exec "$@"', "-"]
    command = [sys.executable, "-m", "hotloop", "exporter", "--demo", "--once"]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with (tmp_path / "metrics").open("w") as file:
        done = subprocess.run(
            [*limited, *command], stdout=file, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
            env=environment,
        )  # fmt: skip
    assert done.returncode == 1
    assert "cannot write standard output" in done.stderr


def test_a_port_that_is_taken_is_told(hotloop: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        error = hotloop("exporter", "--demo", "--port", str(port), expect=2).err
    assert f"error: cannot listen on 127.0.0.1 port {port}\ncause: Address already in use" in error
