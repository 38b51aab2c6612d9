"""While the gate of loaders is closed, none of them is at work."""

import threading
from collections.abc import Iterator

import torch

from hotloop.train.gate import LOADING, Gate
from hotloop.train.prefetch import Reader


def test_whoever_closes_waits_for_those_inside_and_holds_the_others() -> None:
    gate, entered, leave, events = Gate(), threading.Event(), threading.Event(), []

    def slow() -> None:
        with gate.passed():
            entered.set()
            leave.wait()
            events.append("slow is out")

    def late() -> None:
        with gate.passed():
            events.append("late is in")

    first = threading.Thread(target=slow)
    first.start()
    entered.wait()
    second = threading.Thread(target=late)
    opener = threading.Timer(0.05, leave.set)
    opener.start()
    with gate.closed(60):
        second.start()
        events.append("closed")
    for thread in (first, second, opener):
        thread.join()
    assert events == ["slow is out", "closed", "late is in"]


def test_it_does_not_wait_for_ever() -> None:
    gate, passed = Gate(), []
    with gate.passed(), gate.closed(0.01):
        passed.append("closed in spite of one inside")
    with gate.passed():
        passed.append("open again")
    assert passed == ["closed in spite of one inside", "open again"]


class Package:
    def pack(self, item: float) -> None:
        self.item = item


def test_a_reader_draws_nothing_meanwhile() -> None:
    def draws() -> Iterator[float]:
        while True:
            yield float(torch.rand(()))

    reader = Reader(draws(), [Package() for _ in range(3)])
    for _ in range(50):
        package = reader.next(wait=True)
        assert package is not None
        reader.give_back(package)
        with LOADING.closed(60):
            before = torch.random.get_rng_state()
            assert torch.equal(before, torch.random.get_rng_state())
    assert reader.close()
