import math
import tracemalloc
from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.data.random import Order, batch_seed, sample_generator

seeds = st.integers(0, 2**63)


def order_of(seed: int, epoch: int, samples: int) -> list[int]:
    order: list[int] = Order(seed, epoch, samples).at(range(samples)).tolist()
    return order


@given(seeds, st.integers(0, 1000), st.integers(0, 300))
def test_an_order_is_a_permutation_and_always_the_same(seed: int, epoch: int, samples: int) -> None:
    order = order_of(seed, epoch, samples)
    assert sorted(order) == list(range(samples))
    assert order == order_of(seed, epoch, samples)


@given(seeds, st.integers(1, 10**6), st.data())
def test_a_part_of_an_order_is_that_of_the_whole(seed: int, samples: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, samples))
    places = range(start, data.draw(st.integers(start, min(samples, start + 300))))
    order = Order(seed, 0, samples)
    part = order.at(places).tolist()
    assert part == [order.at(range(place, place + 1))[0] for place in places]
    assert len(set(part)) == len(part)
    assert all(0 <= sample < samples for sample in part)


@pytest.mark.parametrize("samples", [2, 3, 4, 5])
def test_all_orders_of_a_few_are_as_likely(samples: int) -> None:
    """Chi square over a hundred epochs an order: six deviations above what is expected would be a bias."""
    orders = math.factorial(samples)
    counts = Counter(tuple(order_of(7, epoch, samples)) for epoch in range(100 * orders))
    chi_square = sum((counts[order] - 100) ** 2 / 100 for order in permutations(range(samples)))
    assert chi_square < orders + 6 * math.sqrt(2 * orders)


def test_neighbours_in_an_order_of_many_have_nothing_to_do_with_each_other() -> None:
    order = np.array(order_of(0, 0, 100_000))
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(order, np.arange(100_000))[0, 1]) < 0.02
    assert abs(np.corrcoef(order, order_of(0, 1, 100_000))[0, 1]) < 0.02
    assert np.count_nonzero(np.abs(np.diff(order)) == 1) < 15  # two are expected


def test_an_order_holds_little_however_many_samples() -> None:
    tracemalloc.start()
    Order(0, 0, 10**9).at(range(10**9 - 256, 10**9))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 10e6


def test_orders_differ_by_epoch_and_seed() -> None:
    assert order_of(0, 0, 100) != order_of(0, 1, 100)
    assert order_of(0, 0, 100) != order_of(1, 0, 100)


def test_the_order_stays_what_it_was() -> None:
    """Runs resume across versions: these numbers must never change."""
    assert order_of(7, 3, 8) == EXPECTED_ORDER
    assert sample_generator(7, 3, 5).random() == EXPECTED_DRAW


EXPECTED_ORDER = [0, 7, 2, 3, 5, 4, 1, 6]
EXPECTED_DRAW = 0.948541331120402


@given(seeds, st.integers(0, 50), st.integers(0, 10**7))
def test_neighbouring_samples_draw_differently(seed: int, epoch: int, index: int) -> None:
    draws = [
        sample_generator(seed, epoch, index).random(),
        sample_generator(seed, epoch, index + 1).random(),
        sample_generator(seed, epoch + 1, index).random(),
        sample_generator(seed, epoch, index, attempt=1).random(),
    ]
    assert len(set(draws)) == 4
    assert draws[0] == sample_generator(seed, epoch, index).random()


def test_draws_of_many_samples_are_uniform() -> None:
    draws = np.array([sample_generator(0, 0, index).random() for index in range(4000)])
    assert abs(draws.mean() - 0.5) < 0.02
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.05


@given(seeds, st.integers(0, 100), st.integers(0, 100))
def test_a_batch_seed_suits_torch(seed: int, epoch: int, batch: int) -> None:
    assert 0 <= batch_seed(seed, epoch, batch) < 2**63
    assert batch_seed(seed, epoch, batch) != batch_seed(seed, epoch, batch + 1)
