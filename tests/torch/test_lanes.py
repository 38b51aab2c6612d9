"""How lanes of `hotloop run` end, also with torch's thread for page-locked batches."""

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, _utils

from hotloop.accelerate.lanes import How, _wake
from hotloop.accelerate.loading import Loading


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        return index


@pytest.fixture
def loading(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loading]:
    """With torch's own thread, which locks no pages as there is no GPU. What a thread raises fails a test."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    monkeypatch.setattr(_utils.pin_memory, "pin_memory", lambda data, device: data)
    made = Loading(pytest.fail)
    made.install()
    made.set_how(lambda loader: How(2, 2, True))
    yield made
    made.remove()
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":  # it ends once it has seen that its queue was closed
            thread.join(10)
    assert [child for child in torch.multiprocessing.active_children() if child.is_alive()] == []


def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the end of a process."""
    monkeypatch.setattr(threading.Thread, "start", lambda thread: pytest.fail("a thread is started"))


def has_ended(iterator: Any) -> bool:
    parts = (*iterator._workers, iterator._pin_memory_thread)
    for one in parts:
        one.join(5)  # what was ended by a signal has ended a moment later
    return not any(one.is_alive() for one in parts)


@pytest.mark.parametrize("batches", [0, 1, 10])
def test_a_lane_is_left_once_however_often_it_is_told(
    loading: Loading, monkeypatch: pytest.MonkeyPatch, batches: int
) -> None:
    found = iter(DataLoader(Numbers(), 4))
    iterator: Any = found._workers and found.lane.iterator  # type: ignore[attr-defined]
    for _ in range(batches):
        next(found)
    lane = found.lane  # type: ignore[attr-defined]
    with monkeypatch.context() as context:
        no_threads(context)
        loading.leave()
        lane.leave()
        iterator._shutdown_workers()  # torch's own turn
    lane.end()
    assert has_ended(iterator)


def test_both_lanes_are_left_in_the_middle_of_a_switch(loading: Loading, monkeypatch: pytest.MonkeyPatch) -> None:
    found: Any = iter(DataLoader(Numbers(), 4))
    next(found)
    loading.set_how(lambda loader: How(1, 2, True))
    iterators = [found.lane.iterator, found._next_lane.iterator]
    with monkeypatch.context() as context:
        no_threads(context)
        loading.leave()
    assert [has_ended(iterator) for iterator in iterators] == [True, True]


def test_a_switch_ends_the_former_lane_once(loading: Loading, monkeypatch: pytest.MonkeyPatch) -> None:
    found: Any = iter(DataLoader(Numbers(), 4))
    batches, former = [next(found)], found.lane
    loading.set_how(lambda loader: How(1, 2, True))
    batches += list(found)
    assert [number for batch in batches for number in batch.tolist()] == list(range(40))
    assert has_ended(former.iterator)
    former.leave()
    loading.leave()


def test_a_reader_is_woken_as_often_as_it_is_asked() -> None:
    queue = torch.multiprocessing.Queue()
    for _ in range(3):
        _wake(queue)
    assert queue.get(timeout=10) == (None, None)
    assert queue.empty(), "it had something to read already"
    _wake(queue)
    assert queue.get(timeout=10) == (None, None)


def test_a_worker_that_was_killed_while_it_sent_holds_nobody_up() -> None:
    queue = torch.multiprocessing.Queue()
    queue._wlock.acquire()
    _wake(queue)
    assert queue.empty()
