"""The division of a batch between workers and the device's decoder settles where neither holds up the step."""

from statistics import mean

import numpy as np
import pytest

from hotloop.data.stages import Stages
from hotloop.train.split import Split

WORKERS = 8


def settled(
    batch: int, workers: float, decoder: float, step: float, simple: float = 1.0, jitter: float = 0.0
) -> tuple[list[int], float]:
    """What the decoder had of batches once settled, and mean seconds a batch then.

    Rates in images/s, `step` in seconds; `simple`: share of images that the decoder can take; `jitter`: by which times
    vary.
    """
    split, random = Split(batch, WORKERS), np.random.default_rng(1)
    under_way = [split.count] * 4
    counts, times = [], []
    for _ in range(400):
        count = under_way.pop(0)
        under_way.append(split.count)
        decoded = simple * count
        noise = 1 + jitter * random.standard_normal(2).clip(-3, 3)
        working, decoding = noise * [(batch - decoded) / workers, decoded / decoder]
        seconds = max(step, working, decoding)
        late = max(0.0, working - max(step, decoding))
        split.saw(seconds, Stages(late=late, working=WORKERS * working, decoding=decoding))
        times.append(seconds)
        counts.append(count)
    return counts[-64:], mean(times[-64:])


@pytest.mark.parametrize(
    ("workers", "decoder", "step"),
    [(6600, 12000, 0.030), (3100, 12000, 0.030), (1300, 12000, 0.030), (1300, 5000, 0.030), (6600, 2000, 0.030),
     (800, 12000, 0.001), (20000, 12000, 0.001), (300, 12000, 0.030), (5000, 4000, 0.030)],
)  # fmt: skip
@pytest.mark.parametrize("jitter", [0.0, 0.05])
def test_it_settles_near_the_best(workers: float, decoder: float, step: float, jitter: float) -> None:
    best = max(step, 256 / (workers + decoder))
    assert settled(256, workers, decoder, step, jitter=jitter)[1] <= (1.02 + jitter) * best


def test_files_that_the_decoder_cannot_take_are_allowed_for() -> None:
    assert settled(256, 6000, 12000, 0.030, simple=0.5)[1] <= 0.0301


def test_workers_that_are_early_get_all() -> None:
    assert max(settled(256, 20000, 12000, 0.1)[0]) == 0


def test_workers_in_time_leave_the_decoder_as_little_as_their_spare_time_takes() -> None:
    counts, _ = settled(256, 6600, 12000, 0.030)
    assert 256 - 0.91 * 0.030 * 6600 <= mean(counts) <= 256 - 0.89 * 0.030 * 6600


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_small_batches_stay_within_bounds(batch: int) -> None:
    for workers, decoder in ((10, 10_000), (10_000, 10)):
        counts, _ = settled(batch, workers, decoder, 0.001)
        assert min(counts) >= 0
        assert max(counts) <= batch
