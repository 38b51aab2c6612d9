"""What is done while the next batch does not come."""

import pytest

from hotloop.train.patience import Patience, StopRequested


def test_each_long_wait_is_told_once() -> None:
    told: list[str] = []
    patience = Patience(lambda: False, told.append)
    for seconds in (1.0, 29.0):
        patience(seconds, ["/data/a.jpg"])
    assert told == []
    for seconds in (31.0, 32.0, 90.0):
        patience(seconds, ["/data/a.jpg", "/data/b.jpg"])
    assert told == ["no batch for 31.0 s; workers are at /data/a.jpg, /data/b.jpg (is /data there?)"]
    patience(1.0, [])
    patience(40.0, [])
    assert told[1:] == ["no batch for 40.0 s"]


def test_a_request_to_stop_ends_the_wait() -> None:
    with pytest.raises(StopRequested):
        Patience(lambda: True, print)(1.0, [])


def test_one_of_several_ranks_gives_the_batch_some_seconds_of_a_notice_of_thirty() -> None:
    patience = Patience(lambda: True, print, alone=False)
    patience(9.0, [])
    with pytest.raises(StopRequested):
        patience(11.0, [])
