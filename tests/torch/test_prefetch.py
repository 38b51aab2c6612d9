"""Batches read ahead: order, errors, ends. What is copied to a device is in tests/gpu."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import hotloop
from hotloop.train.prefetch import Reader


class Box:
    """Holds an item."""

    def __init__(self) -> None:
        self.item: Any = None

    def pack(self, item: Any) -> None:
        self.item = item


def take_all(reader: Reader[Box]) -> Iterator[Any]:
    while box := reader.next(wait=True):
        yield box.item
        reader.give_back(box)


@given(count=st.integers(0, 40), boxes=st.integers(1, 4))
def test_items_arrive_in_their_order(count: int, boxes: int) -> None:
    reader = Reader(iter(range(count)), [Box() for _ in range(boxes)])
    assert list(take_all(reader)) == list(range(count))
    assert reader.next(wait=True) is None
    reader.close()


def test_a_full_box_is_not_packed_before_it_is_given_back() -> None:
    asked: list[int] = []

    def items() -> Iterator[int]:
        for number in range(9):
            asked.append(number)
            yield number

    reader = Reader(items(), [Box(), Box()])
    first = reader.next(wait=True)
    second = reader.next(wait=True)
    assert first
    assert second
    assert reader.next(wait=False) is None
    assert (first.item, second.item, asked) == (0, 1, [0, 1])
    reader.give_back(first)
    third = reader.next(wait=True)
    assert third is first
    assert third.item == 2
    reader.close()


def test_an_error_arrives_after_what_came_before_it_with_its_cause() -> None:
    def items() -> Iterator[int]:
        yield 1
        try:
            {}["missing"]
        except KeyError as error:
            raise OSError("the disk is gone") from error

    reader = Reader(items(), [Box(), Box()])
    found = []
    with pytest.raises(OSError, match="the disk is gone") as caught:
        found += take_all(reader)
    assert isinstance(caught.value.__cause__, KeyError)
    assert "items" in [entry.name for entry in caught.traceback], "it says where"
    assert reader.next(wait=True) is None
    reader.close()


def test_an_error_is_raised_only_where_nothing_else_is_left() -> None:
    def items() -> Iterator[int]:
        yield from (1, 2)
        raise ValueError("no more")

    reader = Reader(items(), [Box(), Box(), Box()])
    first, second = reader.next(wait=True), reader.next(wait=True)
    assert first
    assert second
    reader._thread.join()
    assert reader.next(wait=False) is None, "the two are still to be used"
    with pytest.raises(ValueError, match="no more"):
        reader.next(wait=True)
    assert reader.next(wait=True) is None


def test_a_generator_that_cannot_be_closed_leaves_nobody_waiting() -> None:
    class Full(Box):
        def pack(self, item: Any) -> None:
            raise OSError("no page-locked memory")

    def items() -> Iterator[int]:
        try:
            yield 1
        finally:
            raise RuntimeError("nor this")

    reader = Reader(items(), [Full()])
    with pytest.raises(OSError, match="no page-locked memory"):
        reader.next(wait=True)
    reader.close()


def test_a_break_reads_no_further() -> None:
    asked: list[int] = []
    going_on = threading.Event()

    def items() -> Iterator[int]:
        for number in range(100):
            asked.append(number)
            if number:
                going_on.wait(5)
            yield number

    reader = Reader(items(), [Box() for _ in range(50)])
    reader.next(wait=True)
    reader._closing = True
    going_on.set()
    reader.close()
    assert len(asked) <= 3


def test_the_thread_computes_gradients_if_its_owner_does() -> None:
    def items() -> Iterator[bool]:
        yield torch.is_grad_enabled()

    with torch.no_grad():
        reader = Reader(items(), [Box()])
        assert list(take_all(reader)) == [False]


def test_closing_ends_the_thread_and_the_generator_that_it_asks() -> None:
    closed = threading.Event()

    def endless() -> Iterator[int]:
        try:
            while True:
                yield 0
        finally:
            closed.set()

    reader = Reader(endless(), [Box()])
    reader.next(wait=True)
    reader.close()
    assert closed.is_set()
    assert not [thread for thread in threading.enumerate() if thread.name == "hotloop-prefetch"]


def test_on_a_cpu_batches_are_what_they_are() -> None:
    loader = DataLoader(torch.arange(6), batch_size=2)  # type: ignore[arg-type]
    ahead = hotloop.prefetch(loader, "cpu")
    assert len(ahead) == 3
    for _ in range(2):  # a second pass too
        assert [batch.tolist() for batch in ahead] == [[0, 1], [2, 3], [4, 5]]
    doubled = hotloop.prefetch(loader, "cpu", transform=lambda batch: batch * 2)
    assert [batch.tolist() for batch in doubled] == [[0, 2], [4, 6], [8, 10]]


def test_a_depth_of_nothing_is_refused() -> None:
    with pytest.raises(hotloop.InputError, match="depth = 0"):
        hotloop.prefetch([], "cpu", depth=0)


@pytest.mark.parametrize("device", [f"cuda:{torch.cuda.device_count()}", "mps", "gpu"])
def test_a_device_that_batches_cannot_be_copied_to_is_refused(device: str) -> None:
    with pytest.raises(hotloop.InputError, match=device):
        hotloop.prefetch([], device)


def test_the_death_of_a_worker_arrives() -> None:
    """In a process of its own, as torch raises it in a signal handler, wherever that process is."""
    script = Path(__file__).parents[1] / "support" / "dying_worker.py"
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    assert "DataLoader worker" in result.stdout, result.stderr
    assert result.returncode == 0
