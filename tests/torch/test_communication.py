"""How long ranks wait for each other's messages."""

from pathlib import Path

import pytest
import torch
from ranks import SLOW_SECONDS
from several import train_together

from hotloop.train.communication import Communication


@pytest.mark.parametrize("variant", ["slow", "slow norm", "slow apart"])
@pytest.mark.parametrize("window", [1, 2])
def test_a_slow_rank_makes_the_other_one_wait(tmp_path: Path, variant: str, window: int) -> None:
    slow, other = train_together(tmp_path / "two", 2, window, variant=variant)
    slept = SLOW_SECONDS * window * len(other["losses"])
    assert slow["communication"] < slept / 2 < other["communication"]


def test_whoever_trains_alone_has_no_such_figure(tmp_path: Path) -> None:
    (alone,) = train_together(tmp_path / "one", 1, 1)
    assert alone["communication"] is None


def test_a_short_window_that_is_timed_counts_for_those_before_it() -> None:
    now = [0.0]
    communication = Communication(torch.device("cpu"), lambda: now[0])
    told = []
    for _ in range(20):
        communication.begin()
        now[0] += 0.019
        with communication.waiting():
            now[0] += 0.003
        communication.end()
        told.append(round((communication.seconds or 0.0) / 0.003, 6))
    assert told == [1] * 5 + [6] * 5 + [11] * 5 + [16] * 5


def test_a_window_that_begins_again_counts_once() -> None:
    now = [0.0]
    communication = Communication(torch.device("cpu"), lambda: now[0])
    for attempts in (2, 1):
        for _ in range(attempts):
            communication.begin()
            with communication.waiting():
                now[0] += 0.1
        communication.end()
    assert communication.seconds == pytest.approx(0.2)
