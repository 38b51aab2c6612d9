"""A host as it is watched: rates between looks, what stands out, and the same over the network."""

import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client", reason="no hotloop[monitor]")

from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from hotloop.core.live import Live
from hotloop.monitor.demo import Demo
from hotloop.monitor.lines import JOB_COLUMNS, details, job_cells, spark
from hotloop.monitor.metrics import Metrics
from hotloop.monitor.profiled import last_profile
from hotloop.monitor.reading import Card, CardsReading, JobsReading
from hotloop.monitor.remote import cards_of, jobs_of
from hotloop.monitor.watched import Watched

NOW = 1_000_000.0
CARD = Card(0, "GPU-1", name="NVIDIA H200", sm_active=0.9, throttled={"power_cap": True, "thermal_hardware": False})
LIVE = Live(
    pid=1, started=1, namespace=1, way="train", job="digits", run="/runs/a", gpu="GPU-1", phase="step", heartbeat=NOW,
    step=100, steps=100, step_seconds=10.0, wait_seconds=0.1, samples=6400,
)  # fmt: skip


class Fixed:
    """A host that has what it is given."""

    def __init__(self, live: Live = LIVE, card: Card = CARD) -> None:
        self.live, self.card = live, card

    def cards(self) -> CardsReading:
        return CardsReading(cards=(self.card,))

    def jobs(self) -> JobsReading:
        return JobsReading((self.live,))

    def close(self) -> None: ...


def watched(host: Fixed) -> Watched:
    return Watched(host, lambda: 0.0, lambda: NOW)


def test_rates_are_of_the_time_between_two_looks() -> None:
    host = Fixed()
    looks = watched(host)
    (first,) = looks.look().jobs
    assert (first.step_seconds, first.wait_share, first.samples_per_second) == (0.1, pytest.approx(0.01), 640)
    host.live = replace(LIVE, steps=110, step_seconds=14.0, wait_seconds=2.1, samples=7040)
    (second,) = looks.look().jobs
    assert (second.step_seconds, second.wait_share, second.samples_per_second) == (0.4, 0.5, 160)
    assert second.recent["step time"] == (0.1, 0.4)
    (third,) = looks.look().jobs
    assert (third.step_seconds, third.wait_share, third.recent["step time"]) == (0.4, 0.5, (0.1, 0.4)), "no step since"
    host.live = replace(LIVE, steps=5, step_seconds=1.0, wait_seconds=0.0)
    assert looks.look().jobs[0].step_seconds == 0.2, "it was started again"


@pytest.mark.parametrize(
    ("live", "card", "verdict"),
    [
        ({}, {}, ""),
        ({"wait_seconds": 5.0}, {}, "waits for data in 50% of its time"),
        ({"wait_seconds": 5.0, "phase": "validating"}, {}, ""),
        ({"heartbeat": NOW - 600}, {}, "no sign of life for 10 min 00 s: it may hang"),
        ({"heartbeat": NOW - 600, "phase": "saving"}, {}, ""),
        ({"heartbeat": NOW - 600, "phase": "starting"}, {}, ""),
        ({"heartbeat": NOW + 600}, {}, ""),
        ({}, {"sm_active": 0.2}, "its GPU is busy for 20% and data is there"),
        ({}, {"sm_active": None, "utilization": 0.2}, "its GPU is busy for 20%"),
        ({}, {"sm_active": None}, ""),
        ({}, {"throttled": {"thermal_hardware": True}}, "GPU 0 is held down: thermal hardware"),
        ({}, {"answers": False}, "GPU 0 does not answer"),
        ({"gpu": ""}, {"answers": False}, ""),
    ],
)
def test_what_stands_out(live: dict[str, object], card: dict[str, object], verdict: str) -> None:
    (job,) = watched(Fixed(replace(LIVE, **live), replace(CARD, **card))).look().jobs  # type: ignore[arg-type]
    assert job.verdict.startswith(verdict)
    assert bool(job.verdict) == bool(verdict)


@pytest.mark.parametrize(("gpu", "told"), [("GPU-1", "3"), ("GPU-unknown", "?"), ("", "–")])
def test_a_jobs_row_tells_its_card(gpu: str, told: str) -> None:
    (job,) = watched(Fixed(replace(LIVE, gpu=gpu), replace(CARD, index=3))).look().jobs
    assert dict(zip(JOB_COLUMNS, job_cells(job), strict=True))["GPU"] == told


def test_an_exporters_text_holds_all_that_the_host_has() -> None:
    host = Demo(now=lambda: 1_790_000_000.0)
    families = list(text_string_to_metric_families(generate_latest(Metrics(host)).decode()))
    read, cards = cards_of(families), host.cards()
    assert read.driver == cards.driver
    assert [replace(card, instances=()) for card in read.cards] == [replace(card, instances=()) for card in cards.cards]
    expected = [
        replace(live, pid=0, started=0, namespace=0, run=live.run.rpartition("/")[2]) for live in host.jobs().jobs
    ]
    assert sorted(jobs_of(families), key=lambda live: (live.job, live.rank)) == sorted(
        expected, key=lambda live: (live.job, live.rank)
    )


def test_cards_that_hung_before_they_told_their_name_are_several() -> None:
    text = "# TYPE hotloop_gpu_reading_ok gauge\n" + "".join(
        f'hotloop_gpu_reading_ok{{uuid="",gpu="{index}"}} 0\n' for index in range(2)
    )
    found = cards_of(text_string_to_metric_families(text)).cards
    assert [(card.index, card.answers) for card in found] == [(0, False), (1, False)]


def test_a_jobs_last_profile_is_told(tmp_path: Path) -> None:
    def write(folder: Path, content: str, written: float) -> None:
        folder.mkdir(parents=True)
        (folder / "profile.json").write_text(content)
        os.utime(folder / "profile.json", (written, written))

    here = tmp_path / "here"
    live = replace(LIVE, run=str(tmp_path / "run"))
    (tmp_path / "proc" / "1").mkdir(parents=True)
    (tmp_path / "proc" / "1" / "cwd").symlink_to(here)

    def told(live: Live = live) -> str:
        return last_profile(live, tmp_path / "proc", lambda: NOW)

    assert told() == ""
    write(here / "profiles" / "digits-1", '{"sentence": "input-bound: 9% waits"}', NOW - 120)
    write(here / "profiles" / "other-1", '{"sentence": "of another script"}', NOW)
    assert told() == f"input-bound: 9% waits (2 min 00 s ago, {here}/profiles/digits-1)"
    write(tmp_path / "run" / "profile", '{"sentence": "copy-bound\\u001b[31m"}', NOW - 60)
    assert told() == f"copy-bound?[31m (1 min 00 s ago, {tmp_path}/run/profile)"
    assert ("last profile", "copy-bound") in details(watched(Fixed(live)).look().jobs[0], "copy-bound")
    write(here / "profiles" / "digits-2", "[" * 100_000, NOW)
    assert told() == ""
    assert told(replace(live, pid=0)) == "", "of another machine"


def test_a_line_of_blocks() -> None:
    assert spark([]) == ""
    assert spark([0.0, 0.0]) == ""
    assert spark([1.0, 2.0, 4.0, 8.0]) == "▂▃▅█"
    assert spark([0.5, 0.5], most=1.0) == "▅▅"
    assert spark([2.0, 4.0], least=None) == "▁█"
    assert spark([-4.0, 4.0]) == "▁█", "a loss may be below 0"


def test_lines_of_a_job_and_its_card() -> None:
    host = Fixed(card=replace(CARD, memory_used_bytes=1, memory_total_bytes=4, power_watts=350, power_limit_watts=700))
    looks = watched(host)
    for number, loss in enumerate((4.0, math.nan, None, 2.0), 1):
        host.live = replace(LIVE, steps=100 + number, step_seconds=10.0 + number, loss=loss)
        host.card = replace(host.card, sm_active=number / 4)
        view = looks.look()
    assert view.jobs[0].recent["loss"] == (4.0, 2.0), "what is no number is no point of a line"
    assert view.recent["GPU-1"] == {"busy": (0.25, 0.5, 0.75, 1.0), "memory": (0.25,) * 4, "power": (0.5,) * 4}
    told = dict(details(view.jobs[0], recent={**view.jobs[0].recent, **view.recent["GPU-1"]}))
    assert (told["loss lately"], told["busy lately"]) == ("█▁", "▃▅▆█")
    assert "temp lately" not in told
    host.card = replace(CARD, uuid="GPU-2")
    assert looks.look().recent.keys() == {"GPU-2"}, "a card that is gone is forgotten"
