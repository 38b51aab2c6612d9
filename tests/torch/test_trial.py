"""Which way of averaging gradients ranks stay with, and that the compiler cuts a model for one of them only."""

from collections.abc import Iterator

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from hotloop.train.compiler import compile_anew, compile_model, uncut
from hotloop.train.trial import Trial


class Ranks:
    """Two of them, of which the other one always agrees."""

    apart = joins = False

    def largest(self, values: list[float]) -> list[float]:
        return values

    def average_apart(self, apart: bool) -> None:
        self.apart = apart


class Tried:
    """A trial whose windows take so many seconds by each way, and its messages some of them."""

    def __init__(self, after: float, during: float, message: float, obstacle: str = "") -> None:
        self._now, self._window, self._seconds = 0.0, {True: after, False: during}, message
        self.ranks, self.reasons = Ranks(), list[str]()
        self.trial = Trial(self.ranks, lambda: obstacle, self._message, self.reasons.append, lambda: self._now)  # type: ignore[arg-type]

    def _message(self) -> None:
        self._now += self._seconds

    def run(self, windows: int) -> list[bool]:
        """Of each window, whether its gradients were averaged after backward."""
        ways = []
        for _ in range(windows):
            self.trial.begin()
            ways.append(self.ranks.apart)
            self._now += self._window[self.ranks.apart]
            changed = self.trial.end()
            assert changed == (self.ranks.apart != ways[-1])
        return ways


def test_messages_that_take_little_are_never_hidden() -> None:
    tried = Tried(after=1.0, during=0.9, message=0.03)
    assert all(tried.run(100)), "nothing else was tried"
    assert tried.trial.over
    assert not tried.reasons


def test_the_faster_way_is_kept_where_messages_take_long() -> None:
    slow = Tried(after=1.0, during=0.9, message=0.1)
    assert slow.run(100) == [True] * 15 + [False] * 85
    assert slow.reasons == [
        "gradients averaged while backward runs take 900.00 ms a step, captured and averaged after it 1000.00 ms"
    ]
    fast = Tried(after=1.0, during=1.1, message=0.1)
    assert fast.run(100) == [True] * 15 + [False] * 15 + [True] * 70
    assert not fast.reasons


def test_what_is_in_the_way_is_told_before_anything_is_tried() -> None:
    tried = Tried(after=1.0, during=1.0, message=0.1, obstacle="weights have hooks")
    assert not any(tried.run(3))
    assert tried.reasons == ["weights have hooks"]


def test_other_work_is_tried_from_the_beginning() -> None:
    tried = Tried(after=1.0, during=0.9, message=0.1)
    tried.run(20)
    tried.trial.restart()
    assert tried.run(16) == [True] * 15 + [False]
    tried.run(50)
    tried.trial.restart()
    assert not any(tried.run(20)), "it was decided"


def test_ranks_that_join_average_during_backward() -> None:
    tried = Tried(after=1.0, during=1.0, message=0.01)
    tried.run(2)
    tried.ranks.joins = True
    assert not any(tried.run(3))
    assert tried.reasons == ["ranks join"]


@pytest.fixture
def group() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_a_model_is_cut_only_where_messages_leave_in_backward() -> None:
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)])
    compile_model(model, "model")
    ddp = DistributedDataParallel(model, bucket_cap_mb=1)
    x = torch.ones(2, 512)

    def pieces() -> int:
        before = counters["aot_autograd"]["ok"]
        ddp(x).sum().backward()
        return counters["aot_autograd"]["ok"] - before

    from torch._dynamo.utils import counters

    assert pieces() > 1
    with uncut():
        assert pieces() == 0, "what is compiled is used"
    compile_anew(ddp)
    with uncut():
        assert pieces() == 1
    assert pieces() == 0
