"""Random numbers go on where a checkpoint left them, of each rank by itself."""

import random

import numpy as np
import torch

from hotloop.train.random_state import random_state, restore_random_state, seed_everything, stacked


def drawn() -> list[float]:
    """The second of two normal numbers is kept by Python's and numpy's generators until it is asked for."""
    numbers = [random.gauss(0, 1), random.random(), float(np.random.normal()), float(np.random.random())]
    return [*numbers, *torch.rand(3).tolist()]


def test_each_rank_goes_on_where_it_was() -> None:
    states, then = [], []
    for rank, used in enumerate((0, 1, 2, 1000)):
        seed_everything(2**31 + rank)
        for _ in range(used):
            drawn()
        states.append(random_state())
        then.append(drawn())
    kept = stacked(states)
    assert kept.shape == (4, len(states[0]))
    assert kept.dtype == torch.uint8
    for row, numbers in zip(kept, then, strict=True):
        restore_random_state(row)
        assert drawn() == numbers


def test_a_state_that_was_restored_is_the_same_state() -> None:
    seed_everything(3)
    state = random_state()
    drawn()
    restore_random_state(stacked([state])[0])
    assert random_state() == state
