"""Ranks decide the same after the same step, without waiting."""

import threading
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.train.agreement import Agreement, Wishes
from hotloop.train.world import ALONE, World


class _Later:
    """What `all_reduce(async_op=True)` gives, among threads."""

    def __init__(self, exchange: "_Exchange", number: int, values: Any) -> None:
        self._exchange, self._number, self._values = exchange, number, values

    def wait(self) -> None:
        self._values.copy_(self._exchange.largest(self._number))


class _Exchange:
    def __init__(self, size: int) -> None:
        self.size = size
        self._sent: dict[int, list[Any]] = {}
        self._changed = threading.Condition()

    def send(self, number: int, values: Any) -> _Later:
        with self._changed:
            self._sent.setdefault(number, []).append(values.clone())
            self._changed.notify_all()
        return _Later(self, number, values)

    def largest(self, number: int) -> Any:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._sent[number]) == self.size, 10)
            values = self._sent[number][0]
            for other in self._sent[number][1:]:
                values = values.maximum(other)
            return values


class _Rank(World):
    """Of a world of threads."""

    def __init__(self, rank: int, exchange: _Exchange, size: int) -> None:
        super().__init__(rank=rank, size=size)
        self.__dict__.update(exchange=exchange, number=0)

    def largest_later(self, values: Any) -> Any:
        self.__dict__["number"] += 1
        exchange: _Exchange = self.__dict__["exchange"]
        return exchange.send(self.__dict__["number"], values)


def decisions(
    size: int, speeds: list[float], wishes: dict[int, dict[int, Wishes]], steps: int, changes: int = -1,
    ranks: int = 0, sent: list[int] | None = None, first_seconds: float | None = None,
) -> list[list[Wishes]]:  # fmt: skip
    """What each rank was told after each step; rank r's wish after step s is wishes[r][s].

    Args:
        changes: before this step the pace is said to be another one.
        ranks: that there are, as they take it; only the first `size` of them are here.
        sent: takes how many messages there were.
        first_seconds: what the step at which the pace changes takes; like all others if not given.
    """
    exchange = _Exchange(size)
    found: list[list[Wishes]] = [[] for _ in range(size)]

    def work(rank: int) -> None:
        now = 0.0
        agreement = Agreement(_Rank(rank, exchange, ranks or size), lambda: now)
        for step in range(steps):
            if step == changes:
                agreement.pace_changes()
            now += speeds[rank] if step != changes or first_seconds is None else first_seconds
            found[rank].append(agreement.after_step(lambda step=step: wishes[rank].get(step, Wishes())))  # type: ignore[misc]
        agreement.finish()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if sent is not None:
        sent.append(len(exchange._sent))
    return found


wish = st.builds(Wishes, st.booleans(), st.booleans(), st.booleans())


@given(
    st.lists(st.sampled_from([1e-4, 0.004, 0.03, 0.2, 3.0]), min_size=2, max_size=3),
    st.lists(st.dictionaries(st.integers(0, 59), wish, max_size=5), min_size=3, max_size=3),
    st.integers(-1, 59),
)
def test_all_are_told_the_same(speeds: list[float], wishes: list[dict[int, Wishes]], changes: int) -> None:
    told = decisions(len(speeds), speeds, dict(enumerate(wishes)), 60, changes)
    assert all(each == told[0] for each in told)
    wanted = {name for each in wishes[: len(speeds)] for at in each.values() for name, on in vars(at).items() if on}
    given = {name for at in told[0] for name, on in vars(at).items() if on}
    assert given <= wanted, "nobody is told what no rank wished"


def test_a_wish_of_one_is_done_by_all_within_a_few_steps() -> None:
    stop = {step: Wishes(stop=True) for step in range(10, 100)}
    told = decisions(2, [0.03, 0.03], {0: {}, 1: stop}, 100)
    first = [next(step for step, at in enumerate(each) if at.stop) for each in told]
    assert first[0] == first[1]
    assert 10 < first[0] <= 10 + 2 * 4, "a tenth of a second is four steps; it is sent at one end and read at the next"


def test_of_long_steps_none_is_done_after_a_wish() -> None:
    """A notice of 30 s has no time for another one of 20 s."""
    told = decisions(2, [20.0, 20.0], {0: {}, 1: {5: Wishes(stop=True)}}, 8)
    assert [at.stop for at in told[0]] == [False] * 5 + [True, False, False]


def test_in_a_validation_of_long_batches_a_wish_is_not_asked_for_as_seldom_as_between_short_steps() -> None:
    stop = {step: Wishes(stop=True) for step in range(12, 200)}
    told = decisions(2, [1e-4, 1e-4], {0: {}, 1: stop}, 200, changes=12)
    assert [at.stop for at in told[0]].index(True) == 12
    told = decisions(2, [1e-4, 1e-4], {0: {}, 1: stop}, 200)
    assert 12 < [at.stop for at in told[0]].index(True) <= 12 + 2 * 32


@pytest.mark.parametrize("first_seconds", [1e-4, 1e-3, 5e-3, 0.05, 0.5])
def test_a_first_batch_that_was_there_already_does_not_set_the_pace_of_long_ones(first_seconds: float) -> None:
    stop = {step: Wishes(stop=True) for step in range(13, 200)}
    told = decisions(2, [0.5, 0.5], {0: {}, 1: stop}, 200, changes=10, first_seconds=first_seconds)
    assert 13 <= [at.stop for at in told[0]].index(True) <= 14


@pytest.mark.parametrize("before", [1e-4, 1e-3, 0.02])
def test_where_steps_come_to_take_long_a_notice_is_not_answered_as_late_as_their_number_says(before: float) -> None:
    exchange, now, given = _Exchange(1), 0.0, 0.0
    agreement = Agreement(_Rank(0, exchange, 2), lambda: now)
    for step in range(2000):
        now += before if step < 500 else 1.0
        given = given or (now if step >= 510 else 0.0)
        if agreement.after_step(partial(Wishes, stop=given > 0)).stop:
            break
    assert 0 < now - given <= 2 * 32


@pytest.mark.parametrize("step", [0, 1, 10, 11])
def test_long_steps_are_known_to_be_long_from_the_first(step: int) -> None:
    told = decisions(2, [20.0, 20.0], {0: {}, 1: {step: Wishes(stop=True)}}, 13, changes=10)
    assert [at.stop for at in told[0]].index(True) == step


@pytest.mark.parametrize(("ranks", "steps_between"), [(2, 1), (256, 1), (1024, 4), (8192, 32)])
def test_messages_of_many_ranks_are_over_before_the_next(ranks: int, steps_between: int) -> None:
    """Of 8,192 one takes 0.8 s."""
    stop = {step: Wishes(stop=True) for step in range(100, 200)}
    sent: list[int] = []
    told = decisions(2, [0.1, 0.1], {0: {}, 1: stop}, 200, ranks=ranks, sent=sent)
    assert 200 // (steps_between + 1) <= sent[0] <= 200 // steps_between + 2
    assert 100 < [at.stop for at in told[0]].index(True) <= 100 + 2 * steps_between + 2


@pytest.mark.parametrize(("ranks", "waits"), [(256, True), (8192, False)])
def test_of_long_steps_the_answer_is_waited_for_where_it_comes_soon(ranks: int, waits: bool) -> None:
    told = decisions(2, [3.0, 3.0], {0: {}, 1: {5: Wishes(stop=True)}}, 8, ranks=ranks)
    assert [at.stop for at in told[0]].index(True) == (5 if waits else 6)


def test_one_alone_has_its_wish_at_once() -> None:
    assert Agreement(ALONE).after_step(lambda: Wishes(save=True)) == Wishes(save=True)
