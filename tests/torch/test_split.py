"""The division of a batch between workers and the device's decoder settles where neither holds up the step."""

from statistics import mean

import pytest

from hotloop.train.split import Split


def settled(batch: int, workers: float, decoder: float, step: float, rounds: int = 400) -> tuple[Split, float]:
    """After many batches, and mean seconds a batch then; rates in images/s, `step` in seconds."""
    split, seconds = Split(batch), step
    under_way = [split.count] * 4
    times = []
    for _ in range(rounds):
        count = under_way.pop(0)
        under_way.append(split.count)
        filled, decoded = (batch - count) / workers, count / decoder
        seconds = max(step, filled, decoded)
        times.append(seconds)
        split.saw(seconds, max(0.0, filled - max(step, decoded)), decoded)
    return split, mean(times[-64:])


@pytest.mark.parametrize(
    ("workers", "decoder", "step"),
    [(6600, 12000, 0.030), (3100, 12000, 0.030), (1300, 12000, 0.030), (1300, 5000, 0.030), (6600, 2000, 0.030),
     (800, 12000, 0.001), (20000, 12000, 0.001), (300, 12000, 0.030)],
)  # fmt: skip
def test_it_settles_near_the_best(workers: float, decoder: float, step: float) -> None:
    best = max(step, 256 / (workers + decoder))
    assert settled(256, workers, decoder, step)[1] <= 1.12 * best


def test_workers_that_are_early_get_all() -> None:
    assert settled(256, 20000, 12000, 0.1)[0].count == 0


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_small_batches_stay_within_bounds(batch: int) -> None:
    for workers, decoder in ((10, 10_000), (10_000, 10)):
        split, _ = settled(batch, workers, decoder, 0.001)
        assert 0 <= split.count <= batch
