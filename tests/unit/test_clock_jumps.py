"""The wall clock is set back or on by an hour while a training runs and is watched."""

import os
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client", reason="no hotloop[monitor]")

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from hotloop.core.live import Publisher, read_live
from hotloop.monitor.ahead import Ahead
from hotloop.monitor.metrics import Metrics
from hotloop.monitor.reading import CardsReading, JobsReading
from hotloop.monitor.text import Text
from hotloop.monitor.watched import Job, Watched
from hotloop.monitor.web.site import Site

HOUR = 3600.0
START = 1_800_000_000.0
jumps = pytest.mark.parametrize("jump", [-HOUR, HOUR, -5 * HOUR, 5 * HOUR, -START])


class Machine:
    """Its clock that only goes on, its wall clock, a training on it, and those who watch that.

    Args:
        elsewhere: the training is in another container: that it lives is known from its file alone.
    """

    def __init__(self, folder: Path, elsewhere: bool = False) -> None:
        self.time, self.set_by, self._folder = 500.0, START, folder
        who = {"namespace": 1} if elsewhere else {}
        self.training = Publisher(folder, self.clock, self.now, way="train", job="digits", phase="step", **who)
        self.training.saved(3.0, 0.5)
        self.metrics = Metrics(self, self.clock, self.now)
        self._watched = Watched(self, self.clock, self.now)
        self.go_on(5)

    def clock(self) -> float:
        return self.time

    def now(self) -> float:
        return self.time + self.set_by

    def go_on(self, seconds: float) -> None:
        """Time goes by, and a step is done."""
        self.time += seconds
        self.training.stepped(seconds, 0.0, samples=64)
        self.training.beat(1)
        (file,) = self._folder.glob("*.json")
        os.utime(file, (self.now(), self.now()))

    def cards(self) -> CardsReading:
        return CardsReading()

    def jobs(self) -> JobsReading:
        return JobsReading(read_live(self._folder, now=self.now).processes)

    def close(self) -> None: ...

    def value(self, name: str) -> float:
        found = text_string_to_metric_families(generate_latest(self.metrics).decode())
        (one,) = [one for family in found for one in family.samples if one.name == f"hotloop_{name}"]
        return one.value

    def age(self, name: str) -> float:
        """Of a moment of the job's, as the rules have it."""
        return self.now() - self.value(f"job_{name}_timestamp_seconds")

    def job(self) -> Job:
        (job,) = self._watched.look().jobs
        return job

    def sign(self) -> str:
        """Of life, as the web page says it."""
        site = Site(self._folder, lambda: read_live(self._folder, now=self.now), self.now)
        return site.answer("/").content.decode().partition("just now")[1]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "live")


@jumps
def test_a_job_lives_on_and_is_as_before_at_its_next_sign_of_life(jump: float, machine: Machine) -> None:
    machine.set_by += jump
    assert machine.job().silent_seconds >= 0
    machine.go_on(2)
    job = machine.job()
    assert (job.silent_seconds, job.verdict, machine.sign()) == (0, "", "just now")
    assert machine.age("heartbeat") == 0


@jumps
def test_ages_of_what_was_before_stay_what_they_are(jump: float, machine: Machine) -> None:
    machine.set_by += jump
    machine.go_on(2)
    if machine.now() > HOUR:
        assert machine.age("start") == pytest.approx(7)
        assert machine.age("checkpoint") == pytest.approx(7)
    else:  # there is no time before 1970
        assert machine.age("start") >= 0
    machine.go_on(100)
    machine.training.saved(1.0, 0.0)
    machine.go_on(3)
    assert machine.age("checkpoint") == pytest.approx(3)


def test_a_checkpoint_may_be_the_first_that_meets_the_new_time(machine: Machine) -> None:
    machine.set_by -= HOUR
    machine.training.saved(1.0, 0.0)
    machine.go_on(4)
    assert machine.age("checkpoint") == pytest.approx(4)
    assert machine.age("start") == pytest.approx(9)


def test_a_clock_that_is_kept_right_moves_nothing(machine: Machine) -> None:
    begun = machine.value("job_start_timestamp_seconds")
    machine.set_by += 0.3
    machine.go_on(2)
    assert machine.value("job_start_timestamp_seconds") == begun


@jumps
def test_rates_are_of_the_clock_that_only_goes_on(jump: float, machine: Machine) -> None:
    machine.job()
    machine.set_by += jump
    machine.go_on(2)
    assert machine.job().samples_per_second == 32


@jumps
def test_of_another_container_too_it_is_back_at_the_next_sign_of_life(jump: float, tmp_path: Path) -> None:
    machine = Machine(tmp_path / "live", elsewhere=True)
    machine.set_by += jump
    assert len(machine.jobs().jobs) <= 1
    machine.go_on(2)
    assert machine.job().verdict == ""


@jumps
def test_reading_ahead_does_not_see_it(jump: float, machine: Machine) -> None:
    ahead, form = Ahead(machine.metrics, machine.clock), Text(generate_latest)
    for _ in range(4):
        machine.go_on(15)
        ahead.page(form)
    machine.go_on(5)
    due = ahead.turn()
    assert due
    machine.set_by += jump
    assert ahead.turn() == due
    machine.go_on(10)
    assert ahead.turn() is None
    assert machine.age("heartbeat") == 0
    assert 0 <= machine.value("exporter_answer_age_seconds") < 1
