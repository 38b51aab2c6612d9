"""What our own code takes of a step is not taken for the script's, and what leaving parts out is compared with."""

import itertools
from types import SimpleNamespace

import pytest

from hotloop.profile.ablations import Ablations
from hotloop.profile.measured import Block, LoaderFacts, Measured, StepTime
from hotloop.profile.shares import ablations, saved


@pytest.mark.parametrize(
    ("own", "computing", "expected"),
    [(0.0, 0.1, 6.0), (3.0, 0.1, 3.0), (5.9, 0.2, 2.0), (3.0, 0.9, 6.0)],
)
def test_steps_without_waits_are_without_the_time_of_our_stand_ins(
    own: float, computing: float, expected: float
) -> None:
    blocks = tuple(
        Block(name, (StepTime(seconds),) * 6, own=taken)
        for name, seconds, taken in (("watched", 10.0, 0.0), ("bare", 10.0, 0.0), ("no_sync", 6.0, own))
    )
    found = ablations(Measured(blocks=blocks), computing)
    assert [(one.name, one.step_seconds) for one in found] == [("no_sync", pytest.approx(expected))]
    assert found[0].gain == pytest.approx(1 - expected / 10)


@pytest.mark.parametrize(
    ("loader", "names", "gain"),
    [(None, ["no_communication"], 1 - 2 / 5), (LoaderFacts(), ["cached_batch", "no_communication"], (5 - 2) / 10)],
)
def test_without_a_loader_batches_given_again_are_the_script_as_it_is(
    loader: LoaderFacts | None, names: list[str], gain: float
) -> None:
    blocks = tuple(
        Block(name, (StepTime(seconds),) * 6)
        for name, seconds in (("watched", 10.0), ("bare", 10.0), ("cached_batch", 5.0), ("no_communication", 2.0))
    )
    found = ablations(Measured(world_size=2, blocks=blocks, loader=loader), 0.1)
    assert [one.name for one in found] == names
    assert saved("communication", found) == pytest.approx(gain)


class OnGpu:
    """A tensor of one value whose reads are counted."""

    is_cuda = True
    shape = ()
    reads = 0

    def item(self) -> float:
        OnGpu.reads += 1
        return 7.0

    cpu = tolist = __float__ = __int__ = item


def test_a_value_given_again_costs_the_whole_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on by a second each time that somebody looks: a stand-in looks twice, and sees one."""
    torch = SimpleNamespace(Tensor=OnGpu, cuda=SimpleNamespace(synchronize=print))
    hooks = SimpleNamespace(stand_in=None, calls_in_step=0)
    ablations, loss, steps = Ablations(torch, hooks), OnGpu(), 20  # type: ignore[arg-type]
    monkeypatch.setattr("time.perf_counter", itertools.count().__next__)
    with ablations.without_waits():
        assert ablations.reading_seconds == 0
        for _ in range(steps):
            hooks.calls_in_step = 0
            assert loss.item() == 7.0
    assert OnGpu.reads == 1
    assert ablations.reading_seconds == pytest.approx(2 * steps, rel=0.01)
