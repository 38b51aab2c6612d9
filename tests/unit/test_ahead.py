"""What is read ahead: one reading a scrape, never old, and as if each had read by itself."""

import threading
from collections.abc import Iterator, Sequence

import pytest

pytest.importorskip("prometheus_client", reason="no hotloop[monitor]")

from prometheus_client.exposition import choose_encoder
from prometheus_client.parser import text_string_to_metric_families

from hotloop.monitor.ahead import OLDEST_SECONDS, Ahead, expected
from hotloop.monitor.demo import Demo
from hotloop.monitor.metrics import Metrics
from hotloop.monitor.reading import Card, CardsReading, JobsReading
from hotloop.monitor.text import Text


class Clock:
    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time


class Counted:
    """A host whose card counts how often it was read, each time for so long."""

    def __init__(self, clock: Clock, seconds: float = 0.02) -> None:
        self._clock, self.seconds, self.looks = clock, seconds, 0

    def cards(self) -> CardsReading:
        self._clock.time += self.seconds
        self.looks += 1
        return CardsReading(cards=(Card(0, "GPU-0", power_watts=self.looks),))

    def jobs(self) -> JobsReading:
        return JobsReading()

    def close(self) -> None: ...


def text(accept: str = "") -> Text:
    return Text(choose_encoder(accept)[0])


class World:
    """Scrapes of one exporter; the thread's turns are taken when they are due."""

    def __init__(self, seconds: float = 0.02) -> None:
        self.clock = Clock()
        self.host = Counted(self.clock, seconds)
        self.ahead = Ahead(Metrics(self.host, self.clock), self.clock)
        self.text = text()

    def until(self, moment: float) -> None:
        while (left := self.ahead.turn()) is not None and self.clock.time + left <= moment:
            self.clock.time += left
        self.clock.time = max(self.clock.time, moment)

    def scrape(self, moment: float, how: Text | None = None) -> tuple[float, float]:
        """Which reading comes, and how long that takes."""
        self.until(moment)
        begun = self.clock.time
        found = self.ahead.page(how or self.text).decode()
        return value(found, "hotloop_gpu_power_watts"), self.clock.time - begun


def value(found: str, name: str) -> float:
    (one,) = [one for family in text_string_to_metric_families(found) for one in family.samples if one.name == name]
    return one.value


@pytest.mark.parametrize(
    ("arrivals", "coming"),
    [
        ([], None),
        ([0], None),
        ([0, 15], None),
        ([0, 15, 30], 45),
        ([0, 15, 30.1], 45.2),
        ([0, 15, 33], None),
        ([0, 0.5, 1], None),
        ([0, 1, 2], 3),
        ([0, 300, 600], 900),
        ([0, 301, 602], None),
        ([0, 5, 15, 20], 30),
        ([5, 15, 20, 30], 35),
        ([0, 0.3, 15, 15.3], 30),
        ([0.3, 15, 15.3, 30], None),
        ([15, 30, 37, 45], None),
        ([37, 45, 60, 75], 90),
    ],
)
def test_a_scrape_is_expected_where_an_interval_came_twice(arrivals: Sequence[float], coming: float | None) -> None:
    assert expected(arrivals) == (None if coming is None else pytest.approx(coming))


@pytest.mark.parametrize("interval", [1.0, 15.0, 60.0])
def test_a_regular_scraper_waits_for_no_reading_and_gets_a_new_one_each_time(interval: float) -> None:
    world = World()
    for number in range(3):
        assert world.scrape(1000 + interval * number) == pytest.approx((number + 1, 0.02))
    for number in range(3, 20):
        moment = 1000 + interval * number
        assert world.scrape(moment) == (number + 1, 0.0)
        assert world.host.looks == number + 1, "as many readings as scrapes"


def test_two_scrapers_at_different_phases_each_get_a_new_reading() -> None:
    world = World()
    moments = [1000 + 15 * number + phase for number in range(8) for phase in (0, 6)]
    found = [world.scrape(moment) for moment in moments]
    assert [number for number, _ in found] == list(range(1, 17))
    assert [took for _, took in found[4:]] == [0.0] * 12


def test_who_has_gone_costs_one_reading() -> None:
    world = World()
    for number in range(5):
        world.scrape(1000 + 15 * number)
    world.until(9000)
    assert world.host.looks == 6
    assert world.scrape(9000) == pytest.approx((7, 0.02)), "nothing old comes"


@pytest.mark.parametrize(("late", "reads"), [(-0.5, True), (-0.05, False), (0.3, False), (0.85, False), (1.2, True)])
def test_who_comes_early_or_late_gets_nothing_older_than_a_second(late: float, reads: bool) -> None:
    world = World()
    for number in range(5):
        world.scrape(1000 + 15 * number)
    moment = 1000 + 15 * 5 + late
    _, took = world.scrape(moment)
    assert (took > 0) == reads
    world.clock.time += 1
    age = value(world.ahead.page(world.text).decode(), "hotloop_exporter_answer_age_seconds")
    assert 0 <= age <= OLDEST_SECONDS


def test_what_was_read_ahead_serves_once() -> None:
    world = World()
    for number in range(5):
        last, _ = world.scrape(1000 + 15 * number)
    again, took = world.scrape(1000 + 15 * 4 + 0.7)
    assert (again, took) == pytest.approx((last + 1, 0.02))


def test_another_format_is_written_for_who_asks_for_it() -> None:
    world, other = World(), text("application/openmetrics-text;version=1.0.0")
    for number in range(4):
        world.scrape(1000 + 15 * number)
    world.until(1000 + 15 * 4)
    assert world.ahead.page(other).endswith(b"# EOF\n")
    assert world.host.looks == 5, "written anew, of what was read"


def test_a_slow_host_is_read_early_enough() -> None:
    world = World(seconds=0.15)
    for number in range(3):
        world.scrape(1000 + 15 * number)
    assert [world.scrape(1000 + 15 * number)[1] for number in range(3, 6)] == [0.0] * 3


class Slow(Demo):
    """A host that is read as long as it is not let go."""

    def __init__(self) -> None:
        super().__init__(now=lambda: 1e9)
        self.asked, self.go, self.looks = threading.Event(), threading.Event(), 0

    def cards(self) -> CardsReading:
        self.looks += 1
        self.asked.set()
        assert self.go.wait(30)
        return super().cards()


@pytest.fixture
def slow() -> Iterator[tuple[Slow, Ahead, Text]]:
    """One whose thread reads for a scrape that is due, and is not let go."""
    host, clock, form = Slow(), Clock(), text()
    ahead = Ahead(Metrics(host, clock), clock)
    ahead.start()
    host.go.set()
    for number in range(3):
        clock.time = 1000 + 0.8 * number
        ahead.page(form)
    host.go.clear()
    host.asked.clear()
    clock.time += 0.8  # the thread sees it now, or after the 0.7 s that it meant to wait
    assert host.asked.wait(30)
    yield host, ahead, form
    host.go.set()
    ahead.close()


def test_who_comes_while_it_is_read_waits_for_that(slow: tuple[Slow, Ahead, Text]) -> None:
    host, ahead, form = slow
    pages = list[bytes]()
    scrapers = [threading.Thread(target=lambda: pages.append(ahead.page(form))) for _ in range(3)]
    for scraper in scrapers:
        scraper.start()
    host.go.set()
    for scraper in scrapers:
        scraper.join(30)
    assert (len(pages), host.looks) == (3, 4), "one reading for all"


def test_its_thread_ends_after_the_reading_that_is_under_way(slow: tuple[Slow, Ahead, Text]) -> None:
    host, ahead, _ = slow
    host.go.set()
    ahead.close()
    assert not [one for one in threading.enumerate() if one.name == "ahead"]
