"""What a scrape gets is well-formed whatever jobs are called, and grows with nothing but what is there now."""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client import generate_latest
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from hotloop.core.live import PHASES, Live, Publisher, read_live
from hotloop.monitor.demo import Demo, eight_h200, recorded
from hotloop.monitor.jobs import read_jobs
from hotloop.monitor.metrics import Metrics
from hotloop.monitor.passwords import Busy, Passwords
from hotloop.monitor.reading import Card, CardsReading, Instance, JobsReading
from hotloop.monitor.text import Text

LIVE = Live(
    pid=1, started=2, namespace=3, way="train", job="a", run="/runs/a-1", ranks=2, gpu="GPU-1", begun=100.0,
    phase="step", heartbeat=200.0, step=50, steps=20, step_seconds=4.0, wait_seconds=1.5,
)  # fmt: skip
MACHINES = Path(__file__).parents[1] / "support/machines"


class Given:
    """A host that shows what it is given."""

    def __init__(self, *jobs: Live, cards: CardsReading | None = None, ignored: dict[str, int] | None = None) -> None:
        self.found, self.broken, self.looks = JobsReading(jobs, ignored or {}), False, 0
        self.cards_found = cards or CardsReading()

    def cards(self) -> CardsReading:
        self.looks += 1
        return self.cards_found

    def jobs(self) -> JobsReading:
        if self.broken:
            raise OSError
        return self.found

    def close(self) -> None:
        pass


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time


def samples(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """All series, from the text that a scrape gets."""
    found: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for family in parse(generate_latest(metrics).decode()):
        for one in family.samples:
            key = (one.name, frozenset(one.labels.items()))
            assert key not in found, f"twice: {key}"
            found[key] = one.value
    return found


def value(metrics: Metrics, name: str, /, **labels: str) -> float | None:
    """The one series with a name and at least these labels; None if there is none."""
    found = [number for (one, has), number in samples(metrics).items() if one == name and labels.items() <= set(has)]
    assert len(found) < 2
    return found[0] if found else None


def test_a_job_by_its_names() -> None:
    live = replace(LIVE, loss=2.5, saves=2, saved=180.0, save_seconds=3.0, metrics={"accuracy": 0.9}, samples=640)
    live = replace(live, communication_seconds=0.25)
    metrics = Metrics(Given(live))
    who = {"job_name": "a", "run": "a-1", "rank": "0"}
    assert value(metrics, "hotloop_job_info", **who, ranks="2", way="train", uuid="GPU-1") == 1
    assert value(metrics, "hotloop_job_heartbeat_timestamp_seconds", **who) == 200
    assert value(metrics, "hotloop_job_steps_total", **who) == 20
    assert value(metrics, "hotloop_job_data_wait_seconds_total", **who) == 1.5
    assert value(metrics, "hotloop_job_communication_seconds_total", **who) == 0.25
    assert value(metrics, "hotloop_job_samples_total", **who) == 640
    assert value(metrics, "hotloop_job_loss", **who) == 2.5
    assert value(metrics, "hotloop_job_metric", **who, metric="accuracy") == 0.9
    assert value(metrics, "hotloop_job_checkpoint_timestamp_seconds", **who) == 180
    assert [value(metrics, "hotloop_job_phase", **who, phase=phase) for phase in PHASES] == [0, 0, 1, 0, 0, 0]


def test_what_a_job_does_not_tell_is_absent_and_not_zero() -> None:
    names = {name for name, _ in samples(Metrics(Given(LIVE)))}
    unknown = (
        "loss", "learning_rate", "samples_total", "memory_bytes", "checkpoint_timestamp_seconds", "checkpoint_seconds",
        "checkpoint_interval_seconds", "metric", "communication_seconds_total",
    )  # fmt: skip
    assert not names & {f"hotloop_job_{name}" for name in unknown}
    assert {"hotloop_job_checkpoints_total", "hotloop_job_restarts_total"} <= names


def test_zeros_that_a_script_of_ones_own_has_not_told_are_absent() -> None:
    told = replace(LIVE, way="library", steps=0, step_seconds=0.0, wait_seconds=0.0, saves=0, restarts=0)
    found = Metrics(Given(told))
    for name in ("job_steps_total", "job_step_seconds_total", "job_checkpoints_total", "job_restarts_total"):
        assert value(found, f"hotloop_{name}") is None
    assert value(found, "hotloop_job_heartbeat_timestamp_seconds") == LIVE.heartbeat


def test_a_card_and_its_parts_by_their_names() -> None:
    card = Card(
        3, "GPU-3", name="NVIDIA H200", bus_id="0:3", mig="on", memory_used_bytes=7, throttled={"power_cap": True},
        ecc_errors={("corrected", "volatile"): 4}, xids={"79": 1}, instances=(Instance("MIG-1", "part", 0, 5),),
    )  # fmt: skip
    metrics = Metrics(Given(cards=CardsReading(cards=(card, Card(4, "GPU-4", answers=False)), failures=1)))
    assert value(metrics, "hotloop_gpu_info", uuid="GPU-3", gpu="3", name="NVIDIA H200", bus_id="0:3", mig="on") == 1
    assert value(metrics, "hotloop_gpu_info", uuid="MIG-1", gpu="3", name="part", mig="0") == 1
    assert value(metrics, "hotloop_gpu_memory_used_bytes", uuid="GPU-3") == 7
    assert value(metrics, "hotloop_gpu_memory_used_bytes", uuid="MIG-1") == 5
    assert value(metrics, "hotloop_gpu_throttled", uuid="GPU-3", reason="power_cap") == 1
    assert value(metrics, "hotloop_gpu_ecc_errors_total", uuid="GPU-3", kind="corrected", counter="volatile") == 4
    assert value(metrics, "hotloop_gpu_xid_errors_total", uuid="GPU-3", xid="79") == 1
    assert value(metrics, "hotloop_gpu_power_watts", uuid="GPU-3") is None
    assert value(metrics, "hotloop_exporter_collect_failures_total", source="cards") == 1
    of_lost = {name: number for (name, labels), number in samples(metrics).items() if ("uuid", "GPU-4") in labels}
    assert of_lost == {"hotloop_gpu_reading_ok": 0}


HOSTILE = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


@given(HOSTILE, HOSTILE, HOSTILE, st.dictionaries(HOSTILE, st.floats(), max_size=5))
def test_labels_may_hold_anything(job: str, uuid: str, way: str, own: dict[str, float]) -> None:
    live = replace(LIVE, job=job, gpu=uuid, way=way, metrics=own)
    metrics = Metrics(Given(live, cards=CardsReading(cards=(Card(0, uuid, name=job),))))
    text = generate_latest(metrics).decode()
    found = {one.name: one.labels for family in parse(text) for one in family.samples}
    assert found["hotloop_job_info"]["job_name"] == job
    assert found["hotloop_job_info"]["uuid"] == uuid
    assert found["hotloop_gpu_info"]["name"] == job


@given(HOSTILE, HOSTILE, st.dictionaries(HOSTILE, st.floats(), max_size=3), st.sampled_from([-5.0, 1e9, 1e-7, 1e22]))
def test_kept_text_is_what_prometheus_client_writes(job: str, other: str, own: dict[str, float], loss: float) -> None:
    """In each format, while numbers, names and series change."""
    accepted = ("", "application/openmetrics-text;version=1.0.0", "text/plain;version=1.0.0;escaping=allow-utf-8")
    host, clock = Given(), Clock()
    metrics = Metrics(host, clock, now=clock)
    formats = [(encode, Text(encode)) for encode, _ in map(choose_encoder, accepted)]
    both = (replace(LIVE, job=job, loss=loss, metrics=own), replace(LIVE, job=other, rank=1, loss=1.0))
    for jobs in (both, (replace(both[0], loss=-loss, metrics={}), both[1]), both[::-1], (), both[:1]):
        host.found = JobsReading(jobs)
        clock.time += 1
        for encode, text in formats:
            assert text.write(metrics.families()) == encode(metrics)


@pytest.mark.parametrize("job", ['a"} 1\nhotloop_gpu_reading_ok{uuid="x"} 0\n#', "\\", "\\n", '\\"', "{}", "é ✓", ""])
def test_a_job_cannot_write_series_of_others(job: str) -> None:
    metrics = Metrics(Given(replace(LIVE, job=job, metrics={job: 1.0})))
    assert {("job_name", job)} <= {label for _, labels in samples(metrics) for label in labels}
    assert not [name for name, _ in samples(metrics) if name.startswith("hotloop_gpu")]
    text = generate_openmetrics(metrics).decode()
    assert job in {one.labels.get("job_name") for family in parse_openmetrics(text) for one in family.samples}


def test_ten_thousand_jobs_leave_nothing_behind() -> None:
    host = Given()
    clock = Clock()
    metrics = Metrics(host, clock)
    before = samples(metrics).keys()
    for number in range(10_000):
        host.found = JobsReading((replace(LIVE, job=f"job-{number}", metrics={f"metric-{number}": 1.0}),))
        clock.time += 1
        if number % 500 == 0:
            assert value(metrics, "hotloop_job_steps_total", job_name=f"job-{number}") == 20
        else:
            assert sum(len(family.samples) for family in metrics.collect()) == len(before) + 17
    host.found = JobsReading()
    clock.time += 1
    assert samples(metrics).keys() == before


def publish(folder: Path, name: str, **changes: object) -> Path:
    """A file as a process of this user would write it that lives in another container."""
    file = folder / f"{name}.json"
    content = {"format": 1, **vars(LIVE), "namespace": 1, **changes}
    file.write_text(json.dumps(content))
    return file


def test_of_two_processes_with_the_same_names_the_one_that_began_last_counts(tmp_path: Path) -> None:
    publish(tmp_path, "one", pid=1, begun=5.0, heartbeat=9.0, step=1)
    publish(tmp_path, "two", pid=2, begun=6.0, heartbeat=8.0, step=2)
    publish(tmp_path, "three", pid=3, begun=4.0, heartbeat=7.0, step=3, run="/elsewhere/a-1")
    publish(tmp_path, "other", pid=4, rank=1, step=4)
    (tmp_path / "torn.json").write_text("{")
    reading = read_jobs(tmp_path)
    assert [(live.rank, live.step) for live in reading.jobs] == [(0, 2), (1, 4)]
    assert reading.ignored == {"foreign": 0, "damaged": 1, "ended": 0, "duplicate": 2}
    metrics = Metrics(Given(*reading.jobs, ignored=dict(reading.ignored)))
    assert value(metrics, "hotloop_exporter_jobs_ignored", reason="duplicate") == 2


def test_whoever_claims_to_be_in_another_container_takes_no_ones_place(tmp_path: Path) -> None:
    ours = Publisher(tmp_path, way="train", job=LIVE.job, run=LIVE.run, rank=LIVE.rank)
    ours.set(steps=20)
    ours.write()
    publish(tmp_path, "forged", pid=1, begun=1e12, heartbeat=1e12, step=666)
    assert [live.step for live in read_jobs(tmp_path).jobs] == [0]
    ours.close()


ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**400), 10**400) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from([*vars(LIVE), "format"]), ANY, max_size=4), ANY)
@example({"metrics": []}, None)
@example({"metrics": {"a": 10**400}}, None)
@example({"step": 10**400, "metrics": None}, [])
def test_whatever_a_file_holds_the_others_are_read(changes: dict[str, object], whole: object) -> None:
    with tempfile.TemporaryDirectory() as name:
        publish(Path(name), "good", pid=1)
        publish(Path(name), "odd", **{"job": "odd", **changes})
        (Path(name) / "none.json").write_text(json.dumps(whole))
        found = read_jobs(Path(name))
    assert LIVE.job in {live.job for live in found.jobs}
    assert samples(Metrics(Given(*found.jobs)))


def test_a_process_is_seen_as_long_as_it_trains(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path, way="train", job="here", run="runs/here-2")
    assert [live.job for live in read_jobs(tmp_path).jobs] == ["here"]
    publisher.close()
    assert read_jobs(tmp_path).jobs == ()
    assert read_jobs(None) == JobsReading()
    assert read_live(tmp_path / "nowhere").processes == ()


def test_two_scrapers_within_half_a_second_share_a_reading() -> None:
    host, clock = Given(LIVE), Clock()
    metrics = Metrics(host, clock)
    for moved, looks in [(0.0, 1), (0.4, 1), (0.2, 2)]:
        clock.time += moved
        samples(metrics)
        assert host.looks == looks


def test_jobs_that_cannot_be_read_are_a_failure_and_the_cards_are_there() -> None:
    host = Given(cards=CardsReading(cards=(Card(0, "GPU-0"),)))
    host.broken = True
    metrics = Metrics(host, now=lambda: 50.0)
    assert value(metrics, "hotloop_exporter_collect_failures_total", source="jobs") == 1
    assert value(metrics, "hotloop_exporter_last_collect_timestamp_seconds", source="cards") == 50
    assert value(metrics, "hotloop_exporter_last_collect_timestamp_seconds", source="jobs") is None
    assert value(metrics, "hotloop_gpu_reading_ok", uuid="GPU-0") == 1


def test_the_demo_is_a_function_of_the_clock_and_its_totals_grow() -> None:
    at = 1_800_000_000.0
    clock = Clock()

    def demo(moment: float) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        return samples(Metrics(Demo(now=lambda: moment), clock, now=lambda: moment))

    early, again, late = demo(at), demo(at), demo(at + 600)
    assert early == again
    assert early.keys() == late.keys()
    totals = {key for key in early if key[0].endswith("_total")}
    assert all(late[key] >= early[key] for key in totals)
    assert sum(name == "hotloop_gpu_reading_ok" for name, _ in early) == 8
    assert sum(name == "hotloop_job_info" for name, _ in early) == 8


def test_the_demos_jobs_are_what_they_are_meant_to_be() -> None:
    now = 1_800_003_000.0
    jobs = {live.job: live for live in Demo(now=lambda: now).jobs().jobs}
    waits = {name: live.wait_seconds / live.step_seconds for name, live in jobs.items()}
    assert waits["imagenet-resnet50"] > 0.5 > 0.05 > waits["gpt2-large"]
    assert now - jobs["llama-finetune"].heartbeat >= 25 * 60
    assert jobs["finetune.py"].way == "run"
    assert jobs["vit-small"].stalled_seconds / (now - jobs["vit-small"].begun) > 0.2
    assert [live.heartbeat for name, live in jobs.items() if name != "llama-finetune"] == [now] * 4


def test_the_demo_takes_the_cards_of_a_saved_machine() -> None:
    cards, driver = recorded(MACHINES / "h200.json")
    demo = Demo(cards, driver)
    saved = json.loads((MACHINES / "h200.json").read_text())
    assert [card.uuid for card in demo.cards().cards] == [gpu["uuid"] for gpu in saved["gpus"]]
    assert {live.gpu for live in demo.jobs().jobs} <= {card.uuid for card in cards}
    assert Demo(*recorded(MACHINES / "no_gpu.json")).jobs().jobs == ()
    assert len(eight_h200()) == 8


@pytest.fixture
def checked() -> SimpleNamespace:
    """Passwords whose hash is the password, and what was asked and waited for."""
    seen = SimpleNamespace(checks=[], waits=[])

    def check(password: bytes, hashed: bytes) -> bool:
        seen.checks.append(password)
        return password == hashed

    seen.passwords = Passwords({"ann": "secret", "bob": "other"}, check, seen.waits.append)
    return seen


def test_a_right_password_is_computed_once_and_a_wrong_one_waits(checked: SimpleNamespace) -> None:
    for _ in range(3):
        assert checked.passwords.are_right("ann", "secret")
    assert (checked.checks, checked.waits) == ([b"secret"], [])
    for name, password in [("ann", "other"), ("bob", "secret"), ("eve", "secret"), ("", ""), ("ann", "")]:
        assert not checked.passwords.are_right(name, password)
    assert len(checked.checks) == 6, "names that are not there cost as much"
    assert checked.waits == [1.0] * 5


def test_few_wait_for_passwords_and_who_was_right_before_does_not() -> None:
    def wait(_: float) -> None:
        """The waiting of the first meets the coming of the others."""
        assert passwords.are_right("ann", "secret")
        try:
            passwords.are_right("ann", "wrong")
        except Busy:
            turned_away.append(True)

    turned_away: list[bool] = []
    passwords = Passwords({"ann": "secret"}, lambda password, hashed: password == hashed, wait)
    assert passwords.are_right("ann", "secret")
    assert not passwords.are_right("ann", "wrong")
    assert turned_away == [True]


def test_bcrypts_limit_is_a_wrong_password() -> None:
    bcrypt = pytest.importorskip("bcrypt", reason="pip install 'hotloop[monitor]'")
    hashed = bcrypt.hashpw(b"secret", bcrypt.gensalt(4)).decode()
    passwords = Passwords({"ann": hashed}, bcrypt.checkpw, lambda _: None)
    assert passwords.are_right("ann", "secret")
    assert not passwords.are_right("ann", "x" * 100)
    assert not passwords.are_right("ann", "sec\0ret")


def test_the_exporter_starts_light() -> None:
    code = "import sys, hotloop.cli.exporter, hotloop.monitor.server, hotloop.monitor.host, hotloop.monitor.demo"
    child = subprocess.run(
        [sys.executable, "-c", f"{code}\nprint(*sys.modules)"], capture_output=True, text=True, env=dict(os.environ)
    )
    heavy = {"torch", "numpy", "pydantic", "rich", "jinja2", "yaml", "bcrypt"}
    assert not heavy & {name.split(".")[0] for name in child.stdout.split()}, child.stderr
