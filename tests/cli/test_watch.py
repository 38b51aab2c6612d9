"""`hotloop watch`: the page in a terminal, what it prints once, and another host's exporter."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from command import Command

pytest.importorskip("textual", reason="no hotloop[monitor]")

from textual.widgets import DataTable

from hotloop.monitor.demo import Demo
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
        (["--url", "file:///etc/passwd", "--once"], 2, "is no address"),
        (["--url", "http://ada:secret@127.0.0.1:1", "--once"], 2, "--url holds a password"),
        (["--url", "http://127.0.0.1:1", "--once"], 1, "127.0.0.1:1 does not answer"),
        (["--url", "https://127.0.0.1:1", "--ca", "/nowhere", "--once"], 2, "--ca /nowhere cannot be used"),
        (["--interval", "0"], 2, "0 is not in the range"),
    ],
)
def test_bad_input(hotloop: Command, options: list[str], code: int, said: str) -> None:
    done = hotloop("watch", *options, expect=code)
    assert said in done.err
    assert "secret" not in done.err


@pytest.mark.parametrize("size", [(80, 24), (160, 50)])
def test_the_live_page_sorts_and_shows_details(size: tuple[int, int]) -> None:
    async def use() -> None:
        app = Watch(Watched(Demo()), "here", 3600)
        async with app.run_test(size=size) as pilot:
            await app.workers.wait_for_complete()
            await pilot.pause()
            jobs = app.query_one("#jobs", DataTable)
            names = [str(jobs.get_row_at(row)[0]) for row in range(jobs.row_count)]
            assert names == sorted(names)
            assert app.query_one("#cards", DataTable).row_count == 8
            await pilot.press("s")
            await app.workers.wait_for_complete()
            await pilot.pause()
            assert str(jobs.get_row_at(0)[0]) == "imagenet-resnet50", "who waits longest for data comes first"
            await pilot.press("enter")
            assert isinstance(app.screen, Details)
            await pilot.press("escape")
            await pilot.press("q")

    asyncio.run(use())
