"""What a step takes in the long run, in a simulated script whose workers had made batches ahead."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from hotloop.accelerate.lanes import How
from hotloop.accelerate.loading import Loading
from hotloop.accelerate.pace import Mean, Step, Stock, Window, enough, mean_of

_MOST = 400


def window(workers: int, ahead: int, making: float, consuming: float, pause: float, first: int) -> Window:
    """Of a script that was busy elsewhere for `pause` seconds while its workers made batches.

    Args:
        ahead: batches that a worker has under way.
        making: one, seconds of one worker.
        consuming: one, seconds.
        first: steps before the window.
    """
    issued = [0.0] * (workers * ahead)
    made: list[float] = []
    taken, waited, now = [], [], pause
    for number in range(first + _MOST + 1):
        made.append((issued[number] if number < workers else max(issued[number], made[number - workers])) + making)
        waited.append(max(0.0, made[number] - now))
        now += waited[-1]
        taken.append(now)
        issued.append(now)
        now += consuming
    for number in range(len(made), len(issued)):
        made.append(max(issued[number], made[number - workers]) + making)

    def stock(at: int) -> Stock:
        time = taken[at]
        ready = sum(one <= time for one in made[at + 1 :])
        under_way = sum(one <= time for one in issued[at + 1 :]) - ready
        return Stock(ready, under_way, at, workers, 1)

    last = first + enough(10, stock(first))
    found = [Step(taken[at + 1] - taken[at], waited[at + 1]) for at in range(first, last)]
    return Window(tuple(found), stock(first), stock(last))


def of_steps_alone(found: Window) -> Mean:
    return mean_of(Window(found.steps))


SCRIPTS = {
    "workers": st.integers(1, 8), "ahead": st.integers(2, 8), "pause": st.floats(0, 800), "first": st.integers(0, 40),
}  # fmt: skip


@given(making=st.floats(0.01, 10), consuming=st.floats(0.01, 10), **SCRIPTS)
def test_no_step_takes_less_than_was_seen_nor_much_more_than_the_slower_of_making_and_consuming(
    workers: int, ahead: int, making: float, consuming: float, pause: float, first: int
) -> None:
    found = window(workers, ahead, making * workers, consuming, pause, first)
    ours, alone = mean_of(found), of_steps_alone(found)
    assert ours.seconds >= alone.seconds
    in_hand = 2 * workers / len(found.steps)
    assert ours.seconds <= max(alone.seconds, max(making, consuming) * (1 + in_hand)) * (1 + 1e-9)
    assert 0 <= alone.waits <= ours.waits + 1e-9 <= 1 + 1e-6


@given(share=st.floats(0.01, 0.9), **SCRIPTS)
def test_workers_that_make_enough_change_nothing(
    workers: int, ahead: int, pause: float, first: int, share: float
) -> None:
    found = window(workers, ahead, share * workers, 1.0, pause, first)
    assert mean_of(found) == of_steps_alone(found)


@pytest.mark.parametrize(
    ("workers", "ahead", "making"), [(1, 4, 1.5), (2, 4, 1.5), (4, 4, 1.5), (8, 4, 1.5), (2, 8, 2.0), (4, 8, 1.2)]
)
def test_a_stock_that_was_made_in_a_pause_is_not_taken_for_speed(workers: int, ahead: int, making: float) -> None:
    found = window(workers, ahead, making * workers, 1.0, pause=1000, first=2)
    ours, alone = mean_of(found), of_steps_alone(found)
    assert alone.seconds < 0.9 * making, "what was made before looks like speed"
    assert ours.seconds == pytest.approx(making, rel=0.12)
    assert abs(ours.seconds - making) < 3 * ours.error


@given(st.lists(st.floats(0.1, 1), min_size=2, max_size=20), st.integers(0, 40), st.integers(0, 40), st.integers(1, 8))
def test_another_pass_or_one_that_ends_says_nothing_of_the_workers(
    seconds: list[float], ready: int, left: int, workers: int
) -> None:
    steps = tuple(Step(each, 0.0) for each in seconds)
    before = Stock(ready, workers, 0, workers, number=1)
    ended = Stock(left, 0, len(steps), workers, number=1)
    following = Stock(left, workers, len(steps), workers, number=2)
    for after in (ended, following):
        assert mean_of(Window(steps, before, after)) == mean_of(Window(steps))


@given(st.integers(1, 200), st.integers(0, 300), st.integers(0, 64))
def test_half_of_a_windows_batches_are_made_in_it(number: int, ready: int, workers: int) -> None:
    steps = enough(number, Stock(ready=ready, workers=workers))
    assert steps >= max(number, 2 * ready)
    assert steps % max(1, workers) == 0
    assert steps < max(number, 2 * ready) + max(1, workers)


@pytest.mark.parametrize("ours", [False, True])
def test_the_stock_of_a_loader_is_counted(ours: bool) -> None:
    loading = Loading(pytest.fail)
    loading.install()
    try:
        if ours:
            loading.set_how(lambda loader: How(2, 3, False))
        batches = iter(DataLoader(TensorDataset(torch.arange(40)), 2, num_workers=2, prefetch_factor=3))
        for _ in range(3):
            next(batches)
        while (found := loading.stock()).under_way:
            pass
        assert (found.ready, found.taken, found.workers, found.idle) == (6, 3, 2, 2)
        assert len(list(batches)) == 17
        assert (loading.stock().ready, loading.stock().taken) == (0, 20)
    finally:
        loading.remove()
