"""Sets of times, as sorted intervals that neither touch nor overlap."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence

Interval = tuple[float, float]
Intervals = Sequence[Interval]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """All times that are in any of them."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def intersection(some: Intervals, others: Intervals) -> list[Interval]:
    """The times that are in both."""
    found: list[Interval] = []
    one = other = 0
    while one < len(some) and other < len(others):
        begin, end = max(some[one][0], others[other][0]), min(some[one][1], others[other][1])
        if begin < end:
            found.append((begin, end))
        if some[one][1] < others[other][1]:
            one += 1
        else:
            other += 1
    return found


def difference(some: Intervals, others: Intervals) -> list[Interval]:
    """The times that are in the first and not in the second."""
    if not some:
        return []
    edges = [some[0][0], *(edge for interval in others for edge in interval), some[-1][1]]
    outside = [(edges[n], edges[n + 1]) for n in range(0, len(edges), 2) if edges[n] < edges[n + 1]]
    return intersection(some, outside)


def length(intervals: Intervals) -> float:
    """How long they are together."""
    return sum(end - begin for begin, end in intervals)


def covers(intervals: Intervals, time: float) -> bool:
    """Whether a time is in them, ends included."""
    number = bisect_right(intervals, (time, float("inf"))) - 1
    return number >= 0 and intervals[number][0] <= time <= intervals[number][1]
