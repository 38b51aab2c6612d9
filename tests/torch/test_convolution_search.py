"""Which way a convolution takes; without a GPU its times are given."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton.testing
from torch import Tensor

from hotloop.kernels import search

CUDNN: Any = torch.backends.cudnn
PROPOSED, SEARCHED = ("ieee", False), ("tf32", True)
Way = tuple[str, bool]


def way() -> Way:
    """What a convolution that runs now is asked for."""
    return CUDNN.conv.fp32_precision, CUDNN.benchmark


class Times:
    """In place of the GPU's: milliseconds of each way, or an error."""

    def __init__(self, proposed: float, searched: float) -> None:
        self.of = {PROPOSED: proposed, SEARCHED: searched}
        self.asked: list[Way] = []
        self.error: Exception | None = None

    def __call__(self, run: Callable[[], Way], **_: object) -> float:
        self.asked.append(run())
        if self.error:
            raise self.error
        return self.of[self.asked[-1]]


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Iterator[Times]:
    given = Times(2.0, 1.0)
    monkeypatch.setattr(triton.testing, "do_bench", given)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(search, "_ways", search._Ways())
    monkeypatch.setattr(CUDNN, "benchmark", True)
    before = way()
    yield given
    assert way() == before


@pytest.mark.parametrize(("proposed", "searched", "taken"), [(2.0, 1.0, SEARCHED), (1.0, 2.0, PROPOSED)])
def test_the_faster_way_is_taken_and_timed_once(times: Times, proposed: float, searched: float, taken: Way) -> None:
    times.of = {PROPOSED: proposed, SEARCHED: searched}
    assert [search.searched(way, "key") for _ in range(3)] == [taken] * 3
    assert times.asked == [PROPOSED, SEARCHED]
    search.searched(way, "another")
    assert len(times.asked) == 4


def test_who_wants_no_search_or_the_same_each_time_gets_it(times: Times, monkeypatch: pytest.MonkeyPatch) -> None:
    search.searched(way, "key")
    monkeypatch.setattr(CUDNN, "deterministic", True)
    assert search.searched(way, "new") == way()
    monkeypatch.setattr(CUDNN, "deterministic", False)
    monkeypatch.setattr(CUDNN, "benchmark", False)
    assert search.searched(way, "key") == way()
    monkeypatch.setattr(CUDNN, "benchmark", True)
    assert len(times.asked) == 2


def test_a_capture_does_not_wait_for_a_search(times: Times, monkeypatch: pytest.MonkeyPatch) -> None:
    assert search.searched(way, "known") == SEARCHED
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert search.searched(way, "new") == PROPOSED
    assert search.searched(way, "known") == SEARCHED
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert search.searched(way, "new") == SEARCHED, "timed after it"


def test_where_timing_finds_no_room_none_is_tried_again(times: Times) -> None:
    times.error = torch.OutOfMemoryError("256 MB")
    assert search.searched(way, "key") == SEARCHED
    times.error = None
    assert search.searched(way, "another") == SEARCHED
    assert times.asked == [PROPOSED]


def test_where_a_way_cannot_be_timed_pytorchs_is_taken_and_others_are_timed(times: Times) -> None:
    times.error = RuntimeError("GET was unable to find an engine to execute this computation")
    assert search.searched(way, "key") == SEARCHED
    times.error = None
    times.of = {PROPOSED: 1.0, SEARCHED: 2.0}
    assert search.searched(way, "another") == PROPOSED
    assert search.searched(way, "key") == SEARCHED


def test_precisions_that_a_user_sets_before_and_after_hold() -> None:
    script = Path(__file__).parents[1] / "support" / "precisions.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.stderr) == ("81\n", "")


def test_an_error_of_the_convolution_leaves_the_settings(times: Times) -> None:
    def fails() -> Tensor:
        raise RuntimeError("no such convolution")

    search.searched(way, "key")
    with pytest.raises(RuntimeError, match="no such"):
        search.searched(fails, "key")


def test_each_thread_searches_and_none_in_the_middle_of_another(times: Times) -> None:
    """PyTorch keeps what it found for each thread, and its settings for all."""
    inside, go_on, found = threading.Event(), threading.Event(), {}

    def slow() -> Way:
        inside.set()
        assert go_on.wait(30)
        return way()

    def first() -> None:
        found["first"] = search.searched(slow, "key")

    def second() -> None:
        found["second"] = search.searched(way, "key")

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    assert inside.wait(30)
    threads[1].start()
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert found == {"first": SEARCHED, "second": SEARCHED}
    assert len(times.asked) == 4
