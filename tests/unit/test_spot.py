"""Machines that may be taken away: the formulae against trainings that are played through."""

import math
import random
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotloop.core.errors import InputError
from hotloop.core.save_interval import daly_interval, young_interval
from hotloop.plan.advice import Asked, _parts, advise
from hotloop.plan.lifetime import Empirical, First, Lifetime, Observed, Weibull, fitted
from hotloop.plan.replay import Life, bands, observed, read_trace, replay
from hotloop.plan.spot import Costs, best_interval, outlook, price

HOUR = 3600.0


def drawn(lifetime: Weibull, chance: random.Random) -> float:
    return chance.weibullvariate(lifetime.scale, lifetime.shape)


def played(lifetime: Weibull, interval: float, costs: Costs, lives: int) -> float:
    """Share of the paid time that is work that counts, of so many machines."""
    chance = random.Random(1)
    useful = paid = 0.0
    for _ in range(lives):
        life = drawn(lifetime, chance)
        there = max(0.0, life - costs.restart)
        if chance.random() < costs.noticed:
            useful += max(0.0, there - costs.save) * interval / (interval + costs.save)
        else:
            useful += there // (interval + costs.save) * interval
        paid += life
    return useful / paid


@pytest.mark.parametrize("shape", [0.7, 1.0, 2.0])
@pytest.mark.parametrize("noticed", [0.0, 0.8])
def test_the_share_of_work_is_that_of_machines_played_through(shape: float, noticed: float) -> None:
    lifetime, costs = Weibull.of_mean(4 * HOUR, shape), Costs(30.0, restart=300.0, wait=600.0, noticed=noticed)
    found = outlook(lifetime, 1200.0, costs)
    assert found.paid_share == pytest.approx(played(lifetime, 1200.0, costs, 200_000), abs=0.005)
    parts = found.paid_share + found.lost_share + found.save_share + found.restart_share
    assert parts == pytest.approx(1.0, abs=1e-3)
    assert found.share == pytest.approx(found.paid_share * 4 * HOUR / (4 * HOUR + 600.0))


@settings(max_examples=20)
@given(mean=st.floats(600, 1e6), save=st.floats(0.5, 60))
def test_without_memory_the_best_interval_is_dalys(mean: float, save: float) -> None:
    found, expected = best_interval(Weibull(mean), Costs(save)), daly_interval(save, mean)
    by_formula = outlook(Weibull(mean), expected, Costs(save))
    assert found.paid_share == pytest.approx(by_formula.paid_share, abs=2e-3)
    assert daly_interval(save, mean) == pytest.approx(young_interval(save, mean), rel=0.3)


@pytest.mark.parametrize("shape", [0.1, 0.2, 0.5, 1.0, 20.0])
def test_machines_that_live_for_ages_count(shape: float) -> None:
    """Saves cost next to nothing, and at most a minute is lost with a machine, however uneven lifetimes are."""
    found = outlook(Weibull.of_mean(6 * HOUR, shape), 60.0, Costs(1e-3))
    assert 1 - 60 / (6 * HOUR) < found.paid_share < 1
    together = outlook(First(Weibull.of_mean(48 * HOUR, shape), 8, 0.0), 60.0, Costs(1e-3))
    alone = outlook(Weibull.of_mean(48 * HOUR / 8 ** (1 / shape), shape), 60.0, Costs(1e-3))
    assert together.paid_share == pytest.approx(alone.paid_share, abs=1e-3), "the first of eight is Weibull's, too"


def test_an_interval_far_from_the_best_costs_more() -> None:
    lifetime, costs = Weibull(HOUR, 0.8), Costs(20.0, restart=120.0)
    best = best_interval(lifetime, costs)
    for factor in (0.1, 10.0):
        assert outlook(lifetime, best.interval * factor, costs).paid_share < best.paid_share - 0.05


@settings(max_examples=25, deadline=None)
@given(shape=st.floats(0.5, 3.0), mean=st.floats(100, 1e5), seed=st.integers(0, 99))
def test_a_fit_finds_what_lives_were_drawn_from(shape: float, mean: float, seed: int) -> None:
    chance, truth = random.Random(seed), Weibull.of_mean(mean, shape)
    limit = 1.5 * mean  # those that live longer are still there
    lives = [drawn(truth, chance) for _ in range(3000)]
    found = fitted([Observed(min(life, limit), life <= limit) for life in lives])
    assert found.shape == pytest.approx(shape, rel=0.12)
    assert found.mean == pytest.approx(mean, rel=0.12)


def test_what_was_observed_counts_as_it_was() -> None:
    """By hand: of three, one is lost after 10 s; of two, one after 20 s; the last is still there after 30 s."""
    lifetime = Empirical([Observed(10.0), Observed(20.0), Observed(30.0, ended=False)])
    times = np.array([0.0, 9.9, 10.0, 19.9, 20.0, 30.0])
    assert lifetime.survival(times) == pytest.approx([1, 1, 2 / 3, 2 / 3, 1 / 3, 1 / 3])
    assert lifetime.mean == pytest.approx(10 + 20 / 3 + 10 / 3 + (1 / 3) / (2 / 60))


@settings(max_examples=25)
@given(lives=st.lists(st.floats(1, 1e5), min_size=2, max_size=40))
def test_the_mean_of_lives_that_all_ended_is_their_mean(lives: list[float]) -> None:
    assert Empirical([Observed(life) for life in lives]).mean == pytest.approx(sum(lives) / len(lives), rel=1e-6)


@pytest.mark.parametrize(
    ("machines", "together", "mean"), [(1, 0.0, 1.0), (4, 0.0, 0.25), (4, 1.0, 1.0), (4, 0.5, 0.4)]
)
def test_the_first_loss_of_several(machines: int, together: float, mean: float) -> None:
    found: Lifetime = First(Weibull(HOUR), machines, together)
    assert found.mean == pytest.approx(mean * HOUR, rel=1e-3)


def test_what_work_costs() -> None:
    found = outlook(Weibull(4 * HOUR), 1200.0, Costs(30.0, restart=300.0))
    cost = price(1.0, 3.0, found)
    assert cost.useful_hour == pytest.approx(1.0 / found.paid_share)
    assert cost.saving == pytest.approx(1 - cost.useful_hour / 3.0)
    assert price(cost.ceiling, 3.0, found).saving == pytest.approx(0.0, abs=1e-9)
    assert price(3.0, 3.0, found).saving < 0, "at the same price it does not pay"


def test_a_trace_by_hand() -> None:
    """Saves after each 10 s of work cost 1 s, a restart 2 s, and after a loss 5 s go by."""
    lives, costs = [Life(0, 30), Life(50, 100)], Costs(1.0, restart=2.0, wait=5.0)
    found = replay(lives, 40.0, 10.0, costs, start=0.0)
    # 28 s after the restart: two windows of work, 20 s. From 50 on: 2 s, then 20 s of work and two saves.
    assert (found.wall, found.paid, found.interruptions) == (74.0, 54.0, 1)
    told = replay(lives, 40.0, 10.0, replace(costs, noticed=1.0), start=0.0)
    # Of the 6 s since the last save 5 are work and one saves it; 15 s with two saves are left.
    assert (told.wall, told.paid, told.interruptions) == (69.0, 49.0, 1)
    assert replay(lives, 40.0, 10.0, replace(costs, noticed=0.4), start=0.0).wall == pytest.approx(72.0)
    later = replay(lives, 40.0, 10.0, costs, start=99.0)
    assert later.interruptions == 2, "it goes on at the trace's begin"


def test_a_machine_that_comes_and_goes_while_one_is_waited_for_is_not_there() -> None:
    lives, costs = [Life(0, 30), Life(31, 35), Life(36, 100)], Costs(1.0, restart=2.0, wait=10.0)
    found = replay(lives, 40.0, 10.0, costs, start=0.0)
    # 20 s of work by the first. From 40 on, in the third: 2 s, then 20 s of work and two saves.
    assert (found.wall, found.paid, found.interruptions) == (64.0, 54.0, 1)


@given(st.floats(-1e9, 2e9))
def test_a_trace_is_the_same_whenever_it_began(shift: float) -> None:
    lives, costs = [Life(0, 30), Life(50, 100)], Costs(1.0, restart=2.0, wait=5.0)
    later = [Life(life.start + shift, life.end + shift) for life in lives]
    there, here = replay(later, 40.0, 10.0, costs, 99.0 + shift), replay(lives, 40.0, 10.0, costs, 99.0)
    assert (there.wall, there.interruptions) == (pytest.approx(here.wall, abs=1e-3), here.interruptions)


def test_bands_agree_with_the_formula_for_long_trainings() -> None:
    chance, truth, now, lives = random.Random(3), Weibull.of_mean(2 * HOUR, 0.8), 0.0, []
    for _ in range(3000):
        end = now + drawn(truth, chance)
        lives.append(Life(now, end))
        now = end + 60.0
    costs = Costs(20.0, restart=180.0)
    low, middle, high = bands(lives, 100 * HOUR, 900.0, costs, starts=60)
    expected = 100 * HOUR / outlook(Empirical(observed(lives)), 900.0, costs).paid_share
    assert low.wall <= middle.wall <= high.wall
    assert middle.paid == pytest.approx(expected, rel=0.05)


def weeks(chance: random.Random, number: int, unsteady: float) -> list[Life]:
    """A trace; in each week of ten losses machines live longer or shorter than in others."""
    now, lives = 0.0, []
    for _ in range(number):
        mean = 2 * HOUR * math.exp(chance.gauss(0.0, unsteady))
        for _ in range(10):
            end = now + chance.expovariate(1 / mean)
            lives.append(Life(now, end))
            now = end + 60.0
    return lives


@pytest.mark.parametrize("unsteady", [0.0, 0.7])
def test_nine_in_ten_futures_waste_what_the_parts_of_the_past_tell(unsteady: float) -> None:
    chance, costs, held, ratios = random.Random(5), Costs(20.0, restart=180.0), 0, []
    for _ in range(60):
        past, future = weeks(chance, 8, unsteady), weeks(chance, 8, unsteady)
        advice = advise(Asked(costs, lives=tuple(past), interval=600.0))
        assert advice.waste_low is not None
        assert advice.waste_high is not None
        came = 1 - outlook(Empirical(observed(future)), 600.0, costs).paid_share
        held += advice.waste_low <= came <= advice.waste_high
        ratios.append(advice.waste_high / advice.waste_low)
    assert 48 <= held
    assert (np.median(ratios) > 1.8) == (unsteady > 0), "and where weeks are alike, the range is narrow"


def test_youngs_interval_stands_where_no_other_is_proven() -> None:
    """Machines that all live for about an hour: what is saved shortly before is not lost."""
    chance, costs, lives = random.Random(1), Costs(120.0, restart=60.0), []
    for start in range(0, 40 * 4000, 4000):
        lives.append(Life(start, start + 3600 + chance.uniform(-60, 60)))
    few, many = advise(Asked(costs, lives=tuple(lives[:15]))), advise(Asked(costs, lives=tuple(lives)))
    assert few.outlook.interval == few.young, "of fifteen losses nothing can be told"
    assert many.outlook.paid_share > outlook(Empirical(observed(lives)), many.young, costs).paid_share + 0.05
    assert advise(Asked(costs, lives=tuple(lives), interval=900.0)).outlook.interval == 900.0


def test_of_few_losses_no_range_is_told() -> None:
    lives = weeks(random.Random(0), 2, 0.0)
    told = [advise(Asked(Costs(20.0), lives=tuple(lives[:number]), interval=600.0)).waste_low for number in (15, 16)]
    assert told[0] is None
    assert told[1] is not None


@given(st.lists(st.booleans(), min_size=16, max_size=90).filter(lambda ended: sum(ended) >= 16))
def test_parts_are_the_whole_in_order_and_each_has_its_losses(ended: list[bool]) -> None:
    lives = [Life(float(place), place + 0.5, was) for place, was in enumerate(ended)]
    parts = _parts(lives)
    assert [life for part in parts for life in part] == lives
    losses = [sum(life.ended for life in part) for part in parts]
    assert min(losses) >= 2
    assert max(losses) - min(losses) <= 1


def test_traces_are_read(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("start,end,ended\n2026-01-05T08:00,2026-01-05T09:30,1\n2026-01-05T10:00,2026-01-05T12:00,0\n")
    assert [(one.seconds, one.ended) for one in observed(read_trace(file))] == [(5400.0, True), (7200.0, False)]
    file.write_text("start,end\n0,3600\n4000,5000.5\n", encoding="utf-8-sig")
    assert [life.end for life in read_trace(file)] == [3600.0, 5000.5]


def test_times_do_not_depend_on_where_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("start,end\n2026-10-25T02:30,2026-10-25T03:30\n2026-10-25T03:40Z,2026-10-25T06:00+02:00\n")
    monkeypatch.setenv("TZ", "Europe/Berlin")  # whose clocks go back at that time
    time.tzset()
    try:
        lives = read_trace(file)
    finally:
        monkeypatch.undo()
        time.tzset()
    assert [one.seconds for one in observed(lives)] == [3600.0, 1200.0]


def test_losses_of_one_age_are_counted() -> None:
    lives = tuple(Life(start, start + 600) for start in range(0, 20_000, 1000))
    assert "20 losses of one age" in advise(Asked(Costs(2.0), lives=lives)).lifetime
    assert "one loss" in advise(Asked(Costs(2.0), lives=lives[:1])).lifetime


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no interruption"),
        ("start,end\n", "has no interruption"),
        ("start,end,ended\n0,1,0\n", "has no interruption"),
        ("begin,end\n0,1\n", "line 2: no start and end"),
        ("start,end\n0\n", "line 2: no start and end"),
        ("start,end\n0,soon\n", "line 2: no start and end"),
        ("start,end\n0,inf\n", "line 2: no start and end"),
        ("start,end,ended\n0,1,2\n", "line 2: no start and end, or ended is neither 0 nor 1"),
        ("start,end\n0,10\n5,20\n", "line 3: from 5 to 20"),
        ("start,end\n10,10\n", "line 2: from 10 to 10"),
    ],
)
def test_a_trace_that_is_none_says_where(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(text)
    with pytest.raises(InputError, match=said):
        read_trace(file)
    with pytest.raises(InputError, match="cannot be read"):
        read_trace(tmp_path / "none.csv")


def test_intervals_for_saves_that_never_pay() -> None:
    assert daly_interval(100.0, 40.0) == 40.0
    assert math.isinf(price(1.0, 2.0, outlook(Weibull(10.0, 5.0), 100.0, Costs(1.0))).useful_hour)
