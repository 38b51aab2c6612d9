"""Notices that a machine is about to be taken away, from servers that speak the clouds' protocols, and from files."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from hotloop.core.errors import InputError
from hotloop.core.stopping import stop_at_once
from hotloop.train import notices
from hotloop.train.notices import cloud_of_machine, looks
from hotloop.train.preemption import Preemption

PROXY = "http://127.0.0.1:9"


class Metadata(BaseHTTPRequestHandler):
    """A cloud's metadata service; what it says is the server's."""

    def do_PUT(self) -> None:
        """AWS gives a token."""
        wanted = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds")
        self.server.tokens += 1
        self._answer(200 if self.path == "/latest/api/token" and wanted else 400, f"token{self.server.tokens}")

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        self._answer(*self.server.say(self))

    def _answer(self, code: int, text: str) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Metadata)
        self.tokens = 0
        self.asked: list[str] = []
        self.say: Any = lambda request: (404, "")

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, PROXY)  # nobody is there: a service of the machine's own is asked directly
    made = Server()
    thread = threading.Thread(target=made.serve_forever, args=(0.01,))
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def aws(text: str | None, expired: tuple[str, ...] = ()) -> Any:
    def say(request: BaseHTTPRequestHandler) -> tuple[int, str]:
        token = request.headers.get("X-aws-ec2-metadata-token", "")
        if not token or token in expired:
            return 401, "Unauthorized"
        known = request.path == "/latest/meta-data/spot/instance-action" and text is not None
        return (200, text or "") if known else (404, "<html>Not Found</html>")

    return say


def gcp(text: str) -> Any:
    def say(request: BaseHTTPRequestHandler) -> tuple[int, str]:
        known = request.path == "/computeMetadata/v1/instance/preempted"
        return (200, text) if known and request.headers.get("Metadata-Flavor") == "Google" else (403, "")

    return say


def azure(*events: dict[str, Any], name: str = "vm-1") -> Any:
    def say(request: BaseHTTPRequestHandler) -> tuple[int, str]:
        if request.headers.get("Metadata") != "true":
            return 400, ""
        if request.path.startswith("/metadata/instance/compute/name"):
            return 200, name
        return 200, json.dumps({"DocumentIncarnation": 1, "Events": list(events)})

    return say


PREEMPT = {"EventType": "Preempt", "Resources": ["vm-1"], "NotBefore": "Mon, 19 Sep 2016 18:29:47 GMT"}


@pytest.mark.parametrize(
    ("cloud", "say", "words"),
    [
        ("aws", aws(None), ""),
        ("aws", aws('{"action": "terminate", "time": "08:22:00Z"}'), "AWS: terminate at 08:22:00Z"),
        ("aws", aws('{"action": "hibernate"}'), "AWS: hibernate at once"),
        ("aws", aws('{"action": "stop", "time": "now"}', expired=("token1",)), "AWS: stop at now"),
        ("gcp", gcp("FALSE"), ""),
        ("gcp", gcp("TRUE\n"), "Google Cloud: preempted"),
        ("azure", azure(), ""),
        ("azure", azure({**PREEMPT, "EventType": "Freeze"}), ""),
        ("azure", azure({**PREEMPT, "Resources": ["vm-2"]}), ""),
        ("azure", azure(PREEMPT), "Azure: Preempt not before Mon, 19 Sep 2016 18:29:47 GMT"),
        ("azure", azure({**PREEMPT, "EventType": "Terminate", "NotBefore": ""}), "Azure: Terminate not before now"),
    ],
)  # fmt: skip
def test_each_clouds_notice_is_understood(server: Server, cloud: str, say: Any, words: str) -> None:
    server.say = say
    [look] = looks(cloud, server.address).values()
    assert (look(), look()) == (words, words)


@pytest.mark.parametrize("cloud", ["auto", "off"])
def test_an_address_where_nobody_would_be_asked_is_refused(cloud: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "cloud_of_machine", lambda: "")
    with pytest.raises(InputError, match=r"preemption\.address = http://a would not be asked") as refused:
        looks(cloud, "http://a")
    assert f'cloud = "{cloud}"' in refused.value.cause


def test_a_token_is_asked_for_once(server: Server) -> None:
    server.say = aws(None)
    [look] = looks("aws", server.address).values()
    assert [look() for _ in range(3)] == ["", "", ""]
    assert server.tokens == 1


@pytest.mark.parametrize(
    ("files", "cloud"),
    [
        ({"sys_vendor": "Amazon EC2\n", "product_name": "p5.48xlarge"}, "aws"),
        ({"sys_vendor": "Xen", "product_name": "HVM domU", "bios_version": "4.11.amazon\n"}, "aws"),
        ({"sys_vendor": "Xen", "product_name": "HVM domU", "bios_version": "4.11"}, ""),
        ({"sys_vendor": "Google", "product_name": "Google Compute Engine"}, "gcp"),
        ({"sys_vendor": "Microsoft Corporation", "chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77\n"}, "azure"),
        ({"sys_vendor": "Microsoft Corporation", "product_name": "Virtual Machine"}, ""),
        ({}, ""),
    ],
)
def test_the_firmware_names_the_cloud(tmp_path: Path, files: dict[str, str], cloud: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert cloud_of_machine(tmp_path) == cloud


def test_an_unknown_cloud_is_an_error() -> None:
    with pytest.raises(InputError, match="no such cloud"):
        Preemption(cloud="nimbus")


def requested(preemption: Preemption) -> str:
    """Once there is something; the guard against waiting for ever is the test's own time limit."""
    waited = threading.Event()
    for _ in range(2000):
        if preemption.requested:
            break
        waited.wait(0.01)
    return preemption.requested


def test_a_notice_is_a_request_to_stop(server: Server) -> None:
    server.say = gcp("FALSE")
    with Preemption("gcp", server.address, every_seconds=0.01) as preemption:
        while len(server.asked) < 3:
            assert preemption.requested == ""
        server.say = gcp("TRUE")
        assert requested(preemption) == "Google Cloud: preempted"


def test_a_file_is_a_notice(tmp_path: Path) -> None:
    with Preemption("off", file=str(tmp_path / "stop"), every_seconds=0.01) as preemption:
        assert preemption.requested == ""
        (tmp_path / "stop").touch()
        assert requested(preemption) == f"the file {tmp_path}/stop"


@pytest.mark.parametrize(
    "say", [lambda request: (500, "no"), lambda request: (200, "\xff{"), lambda request: (302, "")]
)
def test_a_service_that_makes_no_sense_is_told_once_and_harms_nothing(server: Server, say: Any, tmp_path: Path) -> None:
    server.say, told = say, []
    with Preemption("azure", server.address, str(tmp_path / "stop"), 0.01, told.append) as preemption:
        while len(server.asked) < 6:
            assert preemption.requested == ""
        (tmp_path / "stop").touch()
        assert requested(preemption) == f"the file {tmp_path}/stop"
    assert len(told) == 1
    assert "no notice of preemption can come from azure" in told[0]


@pytest.mark.parametrize("first", ["stop", "notice"])
def test_what_has_launched_a_run_says_why_it_stops(tmp_path: Path, first: str) -> None:
    """Beside the user's own notice."""
    files = {"stop_file": str(tmp_path / "stop"), "file": str(tmp_path / "notice")}
    with Preemption("off", every_seconds=0.01, **files) as preemption:
        assert not preemption.requested
        (tmp_path / "part").write_text("cancelled")
        (tmp_path / "part").rename(tmp_path / first)
        assert requested(preemption) == {"stop": "cancelled", "notice": f"the file {tmp_path}/notice"}[first]


def test_slurms_signal_is_a_notice_and_a_programs_own_handler_stays() -> None:
    with Preemption("off") as preemption:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert preemption.requested == "SIGUSR1"
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        with Preemption("off") as preemption:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert (preemption.requested, seen) == ("", [signal.SIGUSR1])
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_slurms_signal_is_a_notice_where_it_would_have_ended_a_command_that_begins() -> None:
    before = signal.signal(signal.SIGUSR1, stop_at_once)
    try:
        with Preemption("off") as preemption:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert preemption.requested == "SIGUSR1"
    finally:
        signal.signal(signal.SIGUSR1, before)


_STOPPING_RANK = """
import os, sys
from hotloop.train.preemption import Preemption
with Preemption("off", ranks_folder=sys.argv[1]) as preemption:
    while not preemption.requested:
        pass
    print("stopping", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("repeated", [False, True])
def test_a_rank_that_is_about_to_save_ends_when_others_are_gone(tmp_path: Path, repeated: bool) -> None:
    """Who has started them ends them all by SIGTERM then; one that all processes get is a notice once more."""
    stop = tmp_path / "stop"
    stop.write_text("SIGTERM")
    command = [sys.executable, "-c", _STOPPING_RANK, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdin
        assert rank.stdout
        rank.stdout.readline()
        if not repeated:
            os.utime(stop, (0, 0))
        else:
            os.utime(stop)
        rank.send_signal(signal.SIGTERM)
        if repeated:
            with pytest.raises(subprocess.TimeoutExpired):
                rank.wait(3)
            rank.stdin.close()
        assert rank.wait(30) == (0 if repeated else 143)


def test_a_mount_that_stands_still_makes_nobody_deaf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it says in the end, nothing, takes no notice back; and the process ends meanwhile."""
    stands, looked = threading.Event(), threading.Event()

    def stalled() -> str:
        looked.set()
        stands.wait()
        return ""

    monkeypatch.setattr("hotloop.train.preemption.looks", lambda *names: {"/shared/stop": stalled})
    stop = tmp_path / "stop"
    try:
        with Preemption(stop_file=str(stop)) as preemption:
            looked.wait()
            stop.write_text("Slurm cancels it")
            while not preemption.requested:
                pass
    finally:
        stands.set()
    for watcher in preemption._watchers:
        watcher.join()
    assert preemption.requested == "Slurm cancels it"


@pytest.mark.parametrize("is_rank", [False, True])
def test_signals_to_a_users_forked_children_end_these_alone(tmp_path: Path, is_rank: bool) -> None:
    """As of a pool that is left before its work is done; in the pipe of a rank a SIGTERM would be the end of it."""
    program = """
import multiprocessing, sys, time
from hotloop.train.preemption import Preemption

def slow(number):
    time.sleep(60 * number)
    return number

with Preemption("off", ranks_folder=sys.argv[1]) as preemption:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        print(next(pool.imap_unordered(slow, range(4))))
    time.sleep(1.5)  # the rank looks five times a second, and gives itself another one
    print(f"goes on {preemption.requested}")
"""
    command = [sys.executable, "-c", program, str(tmp_path) if is_rank else ""]
    done = subprocess.run(command, capture_output=True, text=True, timeout=40, check=False)
    assert (done.returncode, done.stdout) == (0, "0\ngoes on \n"), done.stderr
