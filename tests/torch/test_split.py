"""The division of a batch between workers and the device's decoder settles where neither holds up the step."""

from collections.abc import Iterable
from statistics import mean

import numpy as np
import pytest

from hotloop.data.stages import Stages
from hotloop.train.split import Split

WORKERS = 8


def driven(
    split: Split, under_way: int, batch: int, rates: Iterable[tuple[float, float, float]]
) -> tuple[list[int], list[float]]:
    """What the decoder had of each batch, and its seconds, where workers, decoder and step are as fast as `rates` says.

    In images/s, and seconds; a division is seen after the batches that are `under_way`.
    """
    counts, times = [split.count] * under_way, []
    for workers, decoder, step in rates:
        count = counts[-under_way]
        working, decoding = (batch - count) / workers, count / decoder
        times.append(max(step, working, decoding))
        late = max(0.0, working - max(step, decoding))
        split.saw(times[-1], Stages(late=late, working=WORKERS * working, decoding=decoding))
        counts.append(split.count)
    return counts, times


def settled(
    batch: int, workers: float, decoder: float, step: float, simple: float = 1.0, jitter: float = 0.0
) -> tuple[list[int], float]:
    """What the decoder had of batches once settled, and mean seconds a batch then.

    Rates in images/s, `step` in seconds; `simple`: share of images that the decoder can take; `jitter`: by which times
    vary.
    """
    split, random = Split(batch, WORKERS, 4), np.random.default_rng(1)
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
    assert 256 - 0.81 * 0.030 * 6600 <= mean(counts) <= 256 - 0.79 * 0.030 * 6600


def useful(ranks: int, seed: int) -> float:
    """Share of the time in which ranks compute that begin each step together, with workers that are disturbed at times.

    Of a batch in ten the images take three times as long, and all vary by 30 %.
    """
    splits, random = [Split(256, WORKERS, AHEAD + 1) for _ in range(ranks)], np.random.default_rng(seed)
    counts = [[split.count] * (AHEAD + 1) for split in splits]
    there, began, end = [0.0] * ranks, [0.0] * (AHEAD + 1), 0.0
    for _ in range(600):
        late = []
        for rank, split in enumerate(splits):
            count = counts[rank].pop(0)
            longer = max(0.5, 1 + 0.3 * random.standard_normal()) * (3 if random.random() < 0.1 else 1)
            working, decoding = longer * (256 - count) / 6500, count / 12000
            there[rank] = max(there[rank], began[-AHEAD - 1]) + max(working, decoding)
            late.append(Stages(late=max(0.0, there[rank] - end), working=WORKERS * working, decoding=decoding))
            counts[rank].append(split.count)
        began.append(max(end, *there))
        for split, took in zip(splits, late, strict=True):
            split.saw(began[-1] + STEP - end, took)
        end = began[-1] + STEP
    return 400 * STEP / (end - began[-400])


STEP, AHEAD = 0.0315, 8


@pytest.mark.parametrize("seed", range(3))
def test_ranks_that_wait_for_each_other_do_not_take_that_for_time_of_their_own(seed: int) -> None:
    alone, four = useful(1, seed), useful(4, seed)
    assert alone > 0.96
    assert four > 0.92


@pytest.mark.parametrize(
    ("workers", "before", "after"), [(6600, 0.020, 0.030), (2000, 0.090, 0.030), (3000, 0.060, 0.015)]
)
@pytest.mark.parametrize("under_way", [1, 4, 9])
def test_another_step_is_followed(workers: float, before: float, after: float, under_way: int) -> None:
    rates = [(workers, 12000, step) for step in [before] * 200 + [after] * 800]
    counts, times = driven(Split(256, WORKERS, under_way), under_way, 256, rates)
    assert mean(times[-200:]) <= 1.03 * max(after, 256 / (workers + 12000))
    together = round(256 * 12000 / (workers + 12000))
    assert mean(counts[-200:]) == pytest.approx(min(together, 256 - 0.8 * after * workers), abs=6)


@pytest.mark.parametrize("batch", [4, 32, 256])
@pytest.mark.parametrize("slow", ["decoder", "workers"])
def test_a_side_that_was_slow_at_first_gets_images_again(slow: str, batch: int) -> None:
    rate = batch / 0.060
    hindered = (rate / 1000, rate, 0.030) if slow == "workers" else (rate, rate / 1000, 0.030)
    counts, times = driven(Split(batch, WORKERS, 9), 9, batch, [hindered] * 40 + [(rate, rate, 0.030)] * 2000)
    assert times[-1] <= 0.046
    assert 0 < counts[-1] < batch


def test_batches_of_damaged_files_alone_end_nothing() -> None:
    split = Split(4, WORKERS, 1)
    for _ in range(9):
        split.saw(0.1, Stages(working=0.5, reading=0.5))
    assert 0 <= split.count <= 4


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_small_batches_stay_within_bounds(batch: int) -> None:
    for workers, decoder in ((10, 10_000), (10_000, 10)):
        counts, _ = settled(batch, workers, decoder, 0.001)
        assert min(counts) >= 0
        assert max(counts) <= batch
