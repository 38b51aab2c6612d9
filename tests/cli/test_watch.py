"""`hotloop watch`: the page in a terminal, what it prints once, and another host's exporter."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import TCPServer
from typing import Any

import pytest
from command import Command
from exporter import certificate, no_openssl

pytest.importorskip("textual", reason="no hotloop[monitor]")

from textual.pilot import Pilot
from textual.widgets import DataTable, Static

from hotloop.monitor.demo import Demo
from hotloop.monitor.reading import CardsReading, JobsReading
from hotloop.monitor.screen import Details, Watch
from hotloop.monitor.watched import Watched


@contextmanager
def exporter(*options: str) -> Iterator[str]:
    """The address of one that shows the invented host."""
    command = [sys.executable, "-m", "hotloop", "exporter", "--demo", "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            yield process.stdout.readline().strip().removesuffix("/metrics")
        finally:
            process.terminate()


@pytest.mark.skipif(bool(no_openssl()), reason=no_openssl())
def test_a_certificate_of_one_s_own_is_named(hotloop: Command, tmp_path: Path) -> None:
    certificate(tmp_path, "server")
    web = tmp_path / "web.yml"
    web.write_text("tls_server_config: {cert_file: server.pem, key_file: server.key}\n")
    with exporter("--web-config", str(web)) as url:
        done = hotloop("watch", "--url", url, "--once", expect=1)
        assert "fix:   --ca FILE" in done.err
        hotloop("watch", "--url", url, "--ca", str(tmp_path / "server.pem"), "--once", expect=0)


@contextmanager
def answers(content: bytes) -> Iterator[str]:
    """The address of something that sends these bytes to whoever asks."""

    class Handler(BaseHTTPRequestHandler):
        def handle(self) -> None:
            self.connection.recv(65536)
            self.wfile.write(content)

    with TCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_what_is_there_is_printed_once(hotloop: Command) -> None:
    done = hotloop("watch", "--demo", "--once", expect=0)
    assert "gpt2-large" in done.out
    assert "imagenet-resnet50, rank 0: waits for data in" in done.out
    found = json.loads(hotloop("watch", "--demo", "--once", "--json", expect=0).out)
    assert [card["index"] for card in found["cards"]] == list(range(8))
    waits = {job["job"]: job["wait_share"] for job in found["jobs"] if "wait_share" in job}
    assert max(waits, key=lambda name: waits[name]) == "imagenet-resnet50"


def test_a_machine_without_cards_and_trainings_says_so(
    hotloop: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOTLOOP_LIVE", str(tmp_path))
    done = hotloop("watch", "--once", expect=0)
    assert "nothing trains here" in done.out


def test_the_exporter_of_another_host_shows_the_same(hotloop: Command) -> None:
    with exporter() as url:
        done = hotloop("watch", "--url", url, "--once", "--json", expect=0)
    there, here = json.loads(done.out), json.loads(hotloop("watch", "--demo", "--once", "--json", expect=0).out)
    assert [card["uuid"] for card in there["cards"]] == [card["uuid"] for card in here["cards"]]
    assert [(job["job"], job["rank"]) for job in there["jobs"]] == [(job["job"], job["rank"]) for job in here["jobs"]]


def test_a_password_is_sent_and_a_wrong_one_said(
    hotloop: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import bcrypt

    web = tmp_path / "web.yml"
    web.write_text(f"basic_auth_users:\n  ada: {bcrypt.hashpw(b'right', bcrypt.gensalt(4)).decode()}\n")
    with exporter("--web-config", str(web)) as url:
        monkeypatch.setenv("HOTLOOP_WATCH_PASSWORD", "right")
        hotloop("watch", "--url", url, "--user", "ada", "--once", expect=0)
        monkeypatch.setenv("HOTLOOP_WATCH_PASSWORD", "wrong")
        done = hotloop("watch", "--url", url, "--user", "ada", "--once", expect=1)
    assert "refuses" in done.err
    assert "HTTP 401" in done.err
    assert "wrong" not in done.err


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--json"], 2, "--json needs --once"),
        ([], 2, "this is no terminal"),
        (["--demo", "--url", "http://a:1"], 2, "--url and --demo"),
        (["--user", "ada"], 2, "--user and --ca need --url"),
        (["--user", "ada", "--url", "http://gpu-1:9400", "--once"], 2, "would send the password readably"),
        (["--url", "file:///etc/passwd", "--once"], 2, "is no address"),
        (["--url", "http://ada:secret@127.0.0.1:1", "--once"], 2, "--url holds a name or a password"),
        (["--url", "http://ada:secret@127.0.0.1:x", "--once"], 2, "--url holds a name or a password"),
        (["--url", "http://127.0.0.1:99999", "--once"], 2, "is no address"),
        (["--url", "http://[::1", "--once"], 2, "is no address"),
        (["--url", "http://a b", "--once"], 2, "is no address"),
        (["--url", "http://127.0.0.1:1", "--once"], 1, "127.0.0.1:1 does not answer"),
        (["--url", "https://127.0.0.1:1", "--ca", "/nowhere", "--once"], 2, "--ca /nowhere cannot be used"),
        (["--interval", "0"], 2, "0 is not in the range"),
        (["--interval", "nan"], 2, "'nan' is no number"),
    ],
)
def test_bad_input(hotloop: Command, options: list[str], code: int, said: str) -> None:
    done = hotloop("watch", *options, expect=code)
    assert said in done.err
    assert "secret" not in done.err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "speaks no HTTP"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "speaks no HTTP"),
        (b"HTTP/1.0 200 OK\r\n\r\nnode_load1 0.5\n", "no name in it begins with hotloop_"),
        (b'HTTP/1.0 200 OK\r\n\r\nhotloop_job_info{job_name="a",run="",rank="0",ranks="1",way="run",uuid=""} 1\n'
         b'hotloop_job_step{job_name="a",run="",rank="0"} +Inf\n', "does not tell metrics of hotloop's"),
    ],
)  # fmt: skip
def test_what_is_no_exporter_is_said(hotloop: Command, content: bytes, said: str) -> None:
    with answers(content) as url:
        done = hotloop("watch", "--url", url, "--once", expect=1)
    assert said in done.err
    assert len(done.err.splitlines()) == 3


def test_who_answers_cannot_steer_the_terminal(hotloop: Command) -> None:
    labels = b'{job_name="\x1b]0;mine\x07",run="",rank="0",ranks="1",way="run",uuid=""}'
    with answers(b"HTTP/1.0 200 OK\r\n\r\nhotloop_job_info" + labels + b" 1\n") as url:
        assert "?]0;mine?" in hotloop("watch", "--url", url, "--once", expect=0).out
    with answers(b"HTTP/1.0 500 \x1b[31mred\r\n\r\n") as url:
        assert "HTTP 500 ?[31mred" in hotloop("watch", "--url", url, "--once", expect=1).err


async def looked(app: Watch, pilot: Pilot[None]) -> None:
    """Wait until the page shows what its last look has found."""
    await app.workers.wait_for_complete()
    await pilot.pause()


@asynccontextmanager
async def page(watched: Watched, size: tuple[int, int] = (80, 24)) -> AsyncIterator[tuple[Watch, Pilot[None]]]:
    """The live page after its first look."""
    app = Watch(watched, "here", 3600)
    async with app.run_test(size=size) as pilot:
        await looked(app, pilot)
        yield app, pilot


@pytest.mark.parametrize("size", [(80, 24), (160, 50)])
def test_the_live_page_sorts_and_shows_details(size: tuple[int, int]) -> None:
    async def use() -> None:
        async with page(Watched(Demo()), size) as (app, pilot):
            jobs = app.query_one("#jobs", DataTable)
            names = [str(jobs.get_row_at(row)[0]) for row in range(jobs.row_count)]
            assert names == sorted(names)
            assert app.query_one("#cards", DataTable).row_count == 8
            await pilot.press("s")
            await looked(app, pilot)
            assert str(jobs.get_row_at(0)[0]) == "imagenet-resnet50", "who waits longest for data comes first"
            cards = app.query_one("#cards", DataTable)
            assert [str(table.ordered_columns[-1].label) for table in (cards, jobs)] == ["busy", "step time"]
            for _ in range(6):
                await pilot.press("l")
                await looked(app, pilot)
            assert [str(table.ordered_columns[-1].label) for table in (cards, jobs)] == ["power", "power"]
            assert len(str(cards.get_row_at(0)[-1])) >= 7, "a block a look"
            assert max(cards.virtual_size.width, jobs.virtual_size.width) <= size[0], "nothing to scroll to"
            await pilot.press("enter")
            assert isinstance(app.screen, Details)
            await pilot.press("escape")
            await pilot.press("q")

    asyncio.run(use())


def test_details_go_on_while_they_are_shown() -> None:
    clock = [1_000_000.0]

    async def use() -> None:
        async def look() -> str:
            app._look()
            await looked(app, pilot)
            table: Any = app.screen.query_one("#pairs", Static).content
            return " ".join(str(cell) for column in table.columns for cell in column.cells)

        async with page(Watched(Demo(now=lambda: clock[0]), now=lambda: clock[0])) as (app, pilot):
            await pilot.press("enter")
            before = await look()
            clock[0] += 60
            after = await look()
            assert "step, step " in before
            assert before != after

    asyncio.run(use())


class Crowded(Demo):
    """The invented host, with more jobs of long names, and without its cards."""

    def cards(self) -> CardsReading:
        return CardsReading()

    def jobs(self) -> JobsReading:
        hangs = replace(super().jobs().jobs[0], phase="step", heartbeat=0.0)
        return JobsReading(tuple(replace(hangs, job=f"{number}-{'name' * 10}") for number in range(6)))


@pytest.mark.parametrize(("size", "told", "last"), [((80, 12), 1, "and 5 more"), ((80, 60), 6, "hang")])
def test_what_stands_out_takes_the_room_that_there_is(size: tuple[int, int], told: int, last: str) -> None:
    async def use() -> None:
        async with page(Watched(Crowded()), size) as (app, _):
            verdict = app.query_one("#verdict", Static)
            text = str(verdict.content)
            assert (text.count("no sign of life"), text.endswith(last)) == (told, True)
            assert verdict.size.height == len(text.splitlines()), "nothing of it is cut off"
            assert app.query_one("#jobs", DataTable).size.height >= 7
            assert not app.query_one("#cards").display, "no head of a table without rows"

    asyncio.run(use())


def test_ctrl_c_ends_it() -> None:
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "hotloop", "watch", "--demo"]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        while b"gpt2-large" not in shown:
            shown += os.read(ours, 65536)
        os.write(ours, b"\x03")
        with suppress(OSError):  # it has ended
            while os.read(ours, 65536):
                pass
        assert process.wait(60) == 0
    os.close(ours)
