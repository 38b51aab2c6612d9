"""What our own code takes of a step is not taken for the script's."""

import pytest

from hotloop.profile.measured import Block, Measured, StepTime
from hotloop.profile.shares import ablations


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
