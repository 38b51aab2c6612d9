"""`hotloop serve`: what a browser gets, whatever lies in the folder and whatever is asked for."""

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from command import Command
from pretended import pretend, record
from runs import write_small_job
from web import Served, served

from hotloop.core.live import Publisher, Seen
from hotloop.monitor.web.server import Server
from hotloop.monitor.web.site import Site

SECRET = "what nobody is to read"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "secret.html").write_text(SECRET)
    pretend(tmp_path / "runs", "first-1", rate=0.01)
    pretend(tmp_path / "runs", "second-2", rate=0.02, samples_per_second=99.0)
    return tmp_path / "runs"


@pytest.fixture
def site(root: Path, tmp_path: Path) -> Iterator[Served]:
    with served(root, tmp_path / "live") as started:
        yield started


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_ends_well_when_it_is_asked_to(number: signal.Signals, tmp_path: Path) -> None:
    with served(tmp_path / "none", tmp_path) as site:
        assert site.get("/").status == 200
        site.process.send_signal(number)
        assert site.process.wait(10) == 0


def test_an_empty_folder_says_what_to_type(tmp_path: Path) -> None:
    with served(tmp_path / "none", tmp_path) as site:
        page = site.get("/")
        assert "hotloop train job.toml" in page.text
        assert "Nothing trains on this machine" in page.text
        assert json.loads(site.get("/api/runs").text) == {"runs": []}
        assert json.loads(site.get("/api/live").text) == {"processes": [], "rows": []}


def test_the_list_is_what_hotloop_runs_tells(site: Served, hotloop: Command, root: Path) -> None:
    told = json.loads(hotloop("runs", "--root", str(root), "--json", expect=0).out)
    assert json.loads(site.get("/api/runs").text) == told
    page = site.get("/").text
    assert "first-1" in page
    assert "1 min 12 s" in page


def test_the_list_is_sorted_and_filtered(site: Served) -> None:
    slow_first = site.get("/?sort=speed&order=up").text
    fast_first = site.get("/?sort=speed&order=down").text
    assert slow_first.index("/runs/second-2") < slow_first.index("/runs/first-1")
    assert fast_first.index("/runs/first-1") < fast_first.index("/runs/second-2")
    found = site.get("/?find=SEC&status=finished").text
    assert "/runs/second-2" in found
    assert "/runs/first-1" not in found
    assert "No run is like that" in site.get("/?find=third").text
    assert site.get("/?sort=nothing&order=5&status=%ff").status == 200


@pytest.mark.parametrize("nonsense", ["", "[", '{"time": 1e300}', '{"time": NaN}', '{"time": null}', "[]", "[" * 9999])
def test_a_run_is_dated_by_what_it_noted_itself(site: Served, root: Path, nonsense: str) -> None:
    """A copy's files have the time of copying."""
    (root / "first-1/starts.jsonl").write_text('{"time": 1.0e9}\n{"time": 1.1e9}\n')
    (root / "second-2/starts.jsonl").write_text(nonsense)
    os.utime(root / "second-2/job.toml", (1.05e9, 1.05e9))
    page = site.get("/?sort=started&order=up").text
    assert page.index("2003-04") < page.index("2004-11"), "the last start"


def test_a_run_s_page_has_all_of_it(site: Served, root: Path) -> None:
    (root / "first-1/profile").mkdir()
    (root / "first-1/profile/report.html").write_text("<h1>Profile</h1>")
    (root / "first-1/profile/profile.json").write_text('{"verdict": "input"}')
    page = site.get("/runs/first-1").text
    assert "Loss by step. training: 2.28 at step 1" in page, "a chart tells its curve in words"
    for part in ("Validation: accuracy", "learning_rate = 0.01", "epoch-0004-step-00000200", "held up by input"):
        assert part in page
    report = site.get("/runs/first-1/reports/profile/report.html")
    assert report.text == "<h1>Profile</h1>"
    assert "sandbox" in report.headers["Content-Security-Policy"]


def test_chosen_runs_are_compared(site: Served, root: Path) -> None:
    page = site.get("/compare?run=first-1&run=second-2").text
    assert "optimizer.learning_rate" in page
    assert "data.train" not in page, "it is the same in both"
    assert page.count('class="line s1"') >= 4, "curves over each other, and their legends"
    for asked in ("", "?run=first-1", "?run=first-1&run=first-1", "?run=first-1&run=none"):
        assert "Choose them in the list" in site.get(f"/compare{asked}").text
    for number in range(8):
        pretend(root, f"more-{number}", steps=2)
    assert site.get("/compare?" + "&".join(f"run=more-{number}" for number in range(8))).status == 200
    assert site.get("/compare?run=first-1&" + "&".join(f"run=more-{number}" for number in range(8))).status == 400


def test_live_trainings_are_told_with_their_runs(site: Served, root: Path, tmp_path: Path) -> None:
    publisher = Publisher(
        tmp_path / "live", way="train", job="<b>first</b>", run=str(root / "first-1"), phase="step", step=7, steps=4,
        step_seconds=2.0, wait_seconds=0.5, samples=64, loss=0.25,
    )  # fmt: skip
    told = json.loads(site.get("/api/live").text)
    assert told["processes"][0]["pid"] == os.getpid()
    assert told["rows"] == [{
        "cells": ["<b>first</b>", "0 of 1", "step", "7", "0.25", "32", "25.0 %", "", "just now"],
        "link": "/runs/first-1",
    }]  # fmt: skip
    assert "&lt;b&gt;first&lt;/b&gt;" in site.get("/").text
    assert "rank 0 of 1 at step 7" in site.get("/runs/first-1").text
    publisher.close()
    assert json.loads(site.get("/api/live").text)["rows"] == []


OUTSIDE = [
    "/runs/../../secret.html", "/runs/..", "/runs/%2e%2e", "/runs/%2e%2e%2f%2e%2e%2fsecret.html", "/../secret.html",
    "/runs/first-1/reports/../../../secret.html", "/runs/first-1/reports/%2e%2e/%2e%2e/%2e%2e/secret.html",
    "/runs/first-1/reports/..%2f..%2f..%2fsecret.html", "/runs/first-1/reports//etc/passwd",
    "/runs/first-1/reports/job.toml", "/runs/first-1/reports/linked.html",
    "/runs/first-1/reports/folder/secret.html", "/runs/first-1/reports/%00", "/static/../site.py",
    "/static/%2e%2e%2fsite.py", "/static/", "//evil.example/",
    "/runs/linked", "/nothing", "/runs/first-1/", "/api/", "/runs/first-1/reports/pipe.html",
]  # fmt: skip


def test_what_is_not_of_the_runs_is_not_given(site: Served, root: Path) -> None:
    (root / "first-1/linked.html").symlink_to(root.parent / "secret.html")
    (root / "first-1/folder").symlink_to(root.parent)
    (root / "linked").symlink_to(root / "first-1")
    os.mkfifo(root / "first-1/pipe.html")
    for target in OUTSIDE:
        answer = site.get(target)
        assert answer.status == 404, target
        assert SECRET not in answer.text


def test_pages_of_others_cannot_read_through_a_name_of_theirs(site: Served) -> None:
    for host in ("evil.example", "evil.example:80", "", "localhost.evil.example", "127.0.0.1.evil.example"):
        for target in ("/", "/api/runs", "/api/live"):
            answer = site.get(target, Host=host)
            assert answer.status == 421, host
            assert "first-1" not in answer.text


def test_forwarded_ports_work(site: Served) -> None:
    for host in ("localhost", "LOCALHOST:1234", "127.0.0.1", "[::1]:80"):
        assert site.get("/", Host=host).status == 200, host


def test_nothing_can_be_changed(site: Served) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        answer = site.get("/", method)
        assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD")


def test_a_head_has_no_body(site: Served) -> None:
    answer = site.get("/", "HEAD")
    assert answer.text == ""
    assert int(answer.headers["Content-Length"]) > 1000


def test_pages_load_nothing_from_elsewhere_and_no_script_of_their_text(site: Served) -> None:
    for target in ("/", "/runs/first-1", "/compare?run=first-1&run=second-2", "/nothing"):
        page = site.get(target)
        assert "script-src 'self'" in page.headers["Content-Security-Policy"]
        for forbidden in ("http://", "https://", "<script>", "style=", "onclick", "<style"):
            assert forbidden not in page.text


def test_names_and_contents_are_shown_as_they_are(site: Served, root: Path) -> None:
    name = "<img src=x onerror=alert(1)>&\"'"
    run = pretend(root, name)
    run.job_file.write_text('name = "<script>alert(2)</script>"\n')
    page = site.get("/").text
    assert "<img" not in page
    link = page.split('href="/runs/%3Cimg')[1].split('"')[0]
    shown = site.get(f"/runs/%3Cimg{link}")
    assert shown.status == 200
    assert "<script>alert" not in shown.text
    assert "&lt;script&gt;alert(2)" in shown.text


def test_a_name_that_is_no_utf_8_does_not_hide_the_list(site: Served, root: Path) -> None:
    (root / "first-1").rename(os.fsdecode(os.fsencode(root) + b"/odd-\xff"))
    assert 'href="/runs/odd-%FF"' in site.get("/").text
    assert "odd-" in site.get("/runs/odd-%FF").text
    assert site.get("/runs/odd-%FF").status == 200


def test_damaged_metrics_are_left_out_and_counted(site: Served, root: Path) -> None:
    good = [json.dumps(record(step)) for step in (1, 2, 3)]
    bad = ['{"event": "step"', '{"event": "step"}', "[1]", "\x00\xff", "[" * 100_000, '{"event": "step", "step": "x"}']
    odd = ['{"event": "step", "step": 4, "loss": NaN, "samples_per_second": "fast"}', '{"event": "step", "step": 5}']
    (root / "first-1/metrics.jsonl").write_text("\n".join([good[0], *bad, good[1], *odd, good[2]]) + "\n")
    page = site.get("/runs/first-1")
    assert page.status == 200
    assert "6 damaged lines of metrics.jsonl left out" in page.text
    assert "Loss by step. training: 2.28 at step 1, 2.23 at 3" in page.text


def test_a_damaged_result_is_none(site: Served, root: Path) -> None:
    for content in ("{", "[]", '{"metrics": {}, "status": []}', '{"metrics": {"a": "b"}}', "[" * 100_000):
        (root / "first-1/result.json").write_text(content)
        assert "interrupted" in site.get("/runs/first-1").text, content[:20]
        assert site.get("/?sort=steps").status == 200


def test_a_result_with_other_types_does_not_hide_the_list(site: Served, root: Path) -> None:
    file = root / "first-1/result.json"
    file.write_text(
        json.dumps({**json.loads(file.read_text()), "steps": "many", "status": ["x"], "train_seconds": None})
    )
    for target in ("/?sort=steps", "/?sort=status", "/runs/first-1", "/compare?run=first-1&run=second-2"):
        assert site.get(target).status == 200


def test_large_files_are_read_in_part(site: Served, root: Path) -> None:
    run = root / "first-1"
    with (run / "metrics.jsonl").open("r+") as file:
        file.seek(200 * 2**20)
        file.write("\n" + json.dumps(record(7)) + "\n")
    for name in ("result.json", "job.toml", "report.html"):
        with (run / name).open("a") as file:
            file.truncate(3 * 2**30)
    page = site.get("/runs/first-1").text
    assert "metrics.jsonl is large" in page
    assert "at step 7" in page
    assert "job.toml is too large to be shown" in page
    assert "damaged" in page
    report = site.get("/runs/first-1/reports/report.html").text
    assert "The page is too large" in report
    assert site.get("/compare?run=first-1&run=second-2").status == 200


def test_a_run_that_is_being_written(site: Served, root: Path) -> None:
    run = pretend(root, "third-3", steps=60, status="running")
    with run.metrics_file.open("a") as file:
        file.write(json.dumps(record(61))[:40])
    with run.locked():
        page = site.get("/runs/third-3").text
    assert "running" in page
    assert "damaged" not in page
    assert "60" in page.split("So far")[1]
    fresh = pretend(root, "fourth-4", steps=0, status="running")
    fresh.metrics_file.unlink()
    assert "Nothing has been logged yet" in site.get("/runs/fourth-4").text


def test_a_port_in_use_is_three_lines(hotloop: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        finished = hotloop("serve", "--port", str(taken.getsockname()[1]), expect=2)
    assert [line.split(":")[0] for line in finished.err.splitlines()] == ["error", "cause", "fix"]
    assert "--port 0" in finished.err


@pytest.mark.skipif(not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists(), reason="no IPv6 here")
def test_it_listens_at_an_ipv6_address() -> None:
    with Server(("::1", 0), Site(Path("none"), lambda: Seen((), {}))) as server:
        assert server.url == f"http://[::1]:{server.server_address[1]}/"


def test_a_training_is_shown_as_it_was(hotloop: Command, make_images: Callable[..., Path], tmp_path: Path) -> None:
    write_small_job(make_images, tmp_path)
    hotloop("train", "job.toml", "--set", "run.dir=runs/real", "--set", "log.report=true", expect=0)
    with served(tmp_path / "runs", tmp_path / "live") as site:
        page = site.get("/runs/real").text
        for title in ("Loss by step. training:", "Validation: accuracy by epoch.", "Samples per second by step."):
            assert title in page
        assert "finished" in page
        assert "step-00000018" in page
        assert "real" in site.get("/runs/real/reports/report.html").text


def test_an_empty_address_is_not_all_of_them(hotloop: Command) -> None:
    assert "no address to listen at" in hotloop("serve", "--host", "", expect=2).err
