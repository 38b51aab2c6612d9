"""Sets of times add up: hypothesis compares them with sets of whole seconds."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from hotloop.profile.intervals import covers, difference, intersection, length, union

SECONDS = st.integers(0, 30)
SOME = st.lists(st.tuples(SECONDS, SECONDS).map(lambda ends: (float(min(ends)), float(max(ends)))), max_size=8)


def whole(intervals: object) -> set[int]:
    """The seconds that are inside."""
    return {second for begin, end in intervals for second in range(int(begin), int(end))}  # type: ignore[attr-defined]


@given(SOME, SOME)
def test_they_are_sets(first: list[tuple[float, float]], second: list[tuple[float, float]]) -> None:
    a, b = union(first), union(second)
    assert whole(a) == whole(first)
    assert whole(intersection(a, b)) == whole(a) & whole(b)
    assert whole(difference(a, b)) == whole(a) - whole(b)
    assert length(a) == len(whole(a))
    for found in (a, intersection(a, b), difference(a, b)):
        assert all(begin < end for begin, end in found)
        assert all(before[1] <= after[0] for before, after in pairwise(found))


@given(SOME, SECONDS)
def test_a_time_is_in_them_or_not(intervals: list[tuple[float, float]], second: int) -> None:
    assert covers(union(intervals), second + 0.5) == (second in whole(intervals))
