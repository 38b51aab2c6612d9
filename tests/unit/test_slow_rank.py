"""Which rank holds the others up."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.train.progress import Span
from hotloop.train.slow_rank import Pace, SlowRanks, _without_each, slow_ranks
from hotloop.train.world import World


def test_a_slow_device_and_slow_reading_are_told_apart() -> None:
    paces = [Pace(100, 0.01), Pace(70, 0.0), Pace(98, 0.4), Pace(97, 0.02)]
    assert set(slow_ranks(paces)) == {(1, "rate"), (2, "data")}
    assert "at 0.71 of the others' rate" in slow_ranks(paces)[1, "rate"]
    assert "waits for data 40 % of its time, the others 1 %" in slow_ranks(paces)[2, "data"]


def test_of_two_ranks_each_is_compared_with_the_other() -> None:
    assert set(slow_ranks([Pace(100, 0.0), Pace(75, 0.0)])) == {(1, "rate")}
    assert not slow_ranks([Pace(100, 0.0), Pace(0.0, 0.0)]), "one that was not measured"


def test_ranks_that_are_alike_are_not_told() -> None:
    assert not slow_ranks([Pace(100, 0.5), Pace(95, 0.6)])
    assert not slow_ranks([Pace(0.0, 0.05), Pace(0.0, 0.0)])


class Two(World):
    """Where the other rank has always the same pace."""

    def gathered(self, value: Pace) -> list[Pace]:
        return [value, Pace(100 if value.rate else 0, 0.0)]

    def from_first(self, value: bool) -> bool:
        return value


def test_what_passes_is_not_told() -> None:
    told: list[str] = []
    ranks = SlowRanks(Two(size=2), lambda: 90.0, told.append)
    for waits in (5.0, 0.0, 5.0):
        ranks.add(Span(seconds=10, wait_seconds=waits))
        ranks.compare()
    assert not told
    for _ in range(2):
        ranks.add(Span(seconds=10, wait_seconds=5))
        ranks.compare()
    assert [line.split(" %")[0] for line in told] == ["rank 0 waits for data 50"]


@given(st.lists(st.floats(0, 1), min_size=2, max_size=9))
def test_each_is_compared_with_the_median_of_the_others(values: list[float]) -> None:
    expected = [statistics.median([*values[:rank], *values[rank + 1 :]]) for rank in range(len(values))]
    assert _without_each(values) == pytest.approx(expected)
