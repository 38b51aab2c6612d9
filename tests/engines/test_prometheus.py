"""A real Prometheus takes what the exporter serves, by TLS and a password, and loses nothing when it restarts."""

import json
import re
import shutil
import signal
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from exporter import certificate, exporter, no_openssl
from ports import free_port

from hotloop.core.live import Publisher
from hotloop.monitor.rules import rules

MISSING = [name for name in ("prometheus", "promtool") if not shutil.which(name)]
pytestmark = [
    pytest.mark.prometheus,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]
PAGE = Path(__file__).parents[2] / "docs/exporter.md"
PATIENCE_SECONDS = 60.0


class Prometheus:
    """One that runs."""

    def __init__(self, port: int) -> None:
        self._port = port

    def ask(self, query: str) -> list[dict[str, Any]]:
        """What a query gives now; nothing while it starts."""
        url = f"http://127.0.0.1:{self._port}/api/v1/query?" + urllib.parse.urlencode({"query": query})
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=20) as answer:
                found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
                return found
        except OSError:
            return []

    def wait_for(self, query: str) -> list[dict[str, Any]]:
        """Ask until there is something."""
        until = time.monotonic() + PATIENCE_SECONDS
        while not (found := self.ask(query)):
            assert time.monotonic() < until, f"nothing for {query}; {self.ask('up')}"
        return found


@contextmanager
def prometheus(folder: Path, port: int, rules: str = "", **scrape: Any) -> Iterator[Prometheus]:
    """One that scrapes a port of this machine, and looks at rules, every second."""
    (folder / "rules.yml").write_text(re.sub(r"interval: \d+s", "interval: 1s", rules))
    job = {"job_name": "hotloop", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}], **scrape}
    content: Mapping[str, Any] = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
        "scrape_configs": [job],
        "rule_files": ["rules.yml"],
    }
    (folder / "prometheus.yml").write_text(json.dumps(content))
    own = free_port()
    command = [
        "prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{own}",
    ]  # fmt: skip
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield Prometheus(own)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def test_promtool_finds_nothing_to_say(tmp_path: Path) -> None:
    with exporter(tmp_path, "--demo") as running:
        checked = subprocess.run(
            ["promtool", "check", "metrics"], input=running.ask().text, capture_output=True, text=True
        )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_prometheus_takes_every_series_of_the_demo(tmp_path: Path) -> None:
    with exporter(tmp_path, "--demo") as running:
        series = [line for line in running.ask().text.splitlines() if not line.startswith("#")]
        with prometheus(tmp_path, running.port) as watching:
            (taken,) = watching.wait_for("scrape_samples_scraped > 0")
            assert abs(int(taken["value"][1]) - len(series)) <= 2, "what is told of answers begins with the first"
            joined = watching.wait_for(
                "hotloop_job_data_wait_seconds_total / hotloop_job_step_seconds_total > 0.5"
                " and on (job_name) hotloop_job_info"
            )
            assert [one["metric"]["job_name"] for one in joined] == ["imagenet-resnet50"]
            queries = re.findall(r"```promql\n(.*?)```", PAGE.read_text(), re.DOTALL)[0].split("\n\n")
            assert [len(watching.wait_for(query)) for query in queries] == [8, 8], "each of the eight processes"


@pytest.mark.skipif(bool(no_openssl()), reason=no_openssl())
def test_prometheus_comes_by_tls_and_with_a_password(tmp_path: Path) -> None:
    bcrypt = pytest.importorskip("bcrypt", reason="pip install 'hotloop[monitor]'")
    certificate(tmp_path, "server")
    content = {
        "tls_server_config": {"cert_file": "server.pem", "key_file": "server.key"},
        "basic_auth_users": {"prometheus": bcrypt.hashpw(b"secret", bcrypt.gensalt(10)).decode()},
    }
    (tmp_path / "web.yml").write_text(json.dumps(content))
    with exporter(tmp_path, "--demo", "--web-config", str(tmp_path / "web.yml")) as running:
        scrape = {
            "scheme": "https", "tls_config": {"ca_file": str(tmp_path / "server.pem"), "min_version": "TLS13"},
            "basic_auth": {"username": "prometheus", "password": "secret"},
        }  # fmt: skip
        with prometheus(tmp_path, running.port, **scrape) as watching:
            assert len(watching.wait_for("hotloop_gpu_reading_ok == 1")) == 8
            assert watching.ask("hotloop_exporter_authentication_failures_total")[0]["value"][1] == "0"


def test_an_alert_fires_while_a_training_hangs_and_clears_once_it_goes_on(tmp_path: Path) -> None:
    late = [7200.0]
    publisher = Publisher(tmp_path / "live", now=lambda: time.time() - late[0], way="train", job="long", phase="step")
    try:
        publisher.stepped(1.0, 0.1, steps=10)
        publisher.write()
        with exporter(tmp_path) as running, prometheus(tmp_path, running.port, rules("")) as watching:
            firing = "ALERTS{alertname='HotloopHang', alertstate='firing'}"
            (alert,) = watching.wait_for(firing)
            assert (alert["metric"]["job_name"], alert["metric"]["severity"]) == ("long", "critical")
            late[0] = 0.0
            publisher.enter("step")
            watching.wait_for(f"absent({firing}) and on () hotloop_job_steps_total == 10")
    finally:
        publisher.close()


def test_an_exporter_that_is_started_again_loses_nothing_of_a_jobs_totals(tmp_path: Path) -> None:
    port = free_port()
    total = "hotloop_job_steps_total{job_name='long'}"
    publisher = Publisher(tmp_path / "live", way="library", job="long")
    try:
        with prometheus(tmp_path, port) as watching:
            for number, steps in enumerate((10, 30)):
                publisher.stepped(1.0, 0.1, steps=steps)
                publisher.write()
                with exporter(tmp_path, "--port", str(port)):
                    watching.wait_for(f"{total} == {10 if number == 0 else 40}")
                if number == 0:
                    watching.wait_for("up == 0")
            (grown,) = watching.wait_for(f"max_over_time({total}[1m]) - min_over_time({total}[1m])")
            assert grown["value"][1] == "30"
            (resets,) = watching.wait_for(f"resets({total}[1m])")
            assert resets["value"][1] == "0"
    finally:
        publisher.close()
