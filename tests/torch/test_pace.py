"""Whose pace it is, by a clock that stands in for host and device."""

import pytest

from hotloop.train import pace
from hotloop.train.pace import Pace


@pytest.mark.parametrize(("host", "device", "is_the_hosts"), [(2.0, 20.0, False), (20.0, 2.0, True), (9.5, 10.0, True)])
def test_the_slower_one_sets_the_pace(
    monkeypatch: pytest.MonkeyPatch, host: float, device: float, is_the_hosts: bool
) -> None:
    now, busy_until = [0.0], [0.0]

    def wait() -> None:
        now[0] = max(now[0], busy_until[0])

    monkeypatch.setattr(pace.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(pace.torch.cuda, "synchronize", wait)
    found = Pace()
    windows, known = 0, False
    while not known:
        found.begin()
        busy_until[0] = max(now[0], busy_until[0]) + device  # the device begins when the first launch arrives
        now[0] += host
        busy_until[0] = max(busy_until[0], now[0])  # and ends no earlier than the last one
        known = found.end()
        windows += 1
    assert windows == 8
    assert found.is_the_hosts == is_the_hosts
