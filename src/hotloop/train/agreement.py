"""What all ranks do after the same step, though each has its own clock and its own signals."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hotloop.train.world import World

_SECONDS = 0.1
"""Between two agreements, about: one costs the host some 50 µs, which a step of a small network would feel."""
_MOST_STEPS = 32
"""Steps of 1 ms can come to take 1 s, once a disk does not deliver: a notice is answered within twice so many.

Where two ranks fill two processors, a step of 1 ms takes 5 µs longer than with 1,000 of them, one of 0.1 ms 33 µs.
"""
_LONG_SECONDS = 1.0
"""Of a step after which ranks wait for the answer, some milliseconds: a notice may give no time for one more."""
_RANK_SECONDS = 1e-4
"""What a message takes for each rank: gloo adds up round a ring, from neighbour to neighbour, twice. With 50 µs for
each it is 0.1 s of 1,024 ranks and 0.8 s of 8,192. It has to be over before the answer is read."""
_ROOM = 4
"""So many times as long as a message is the time between two, at least."""


@dataclass(frozen=True)
class Wishes:
    """What a rank would do now, or what all of them do.

    Attributes:
        stop: save and end.
        log: bring losses to the host and tell.
        save: write a checkpoint.
    """

    stop: bool = False
    log: bool = False
    save: bool = False


NOTHING = Wishes()


class Agreement:
    """Lets ranks decide together without waiting for each other.

    Wishes are sent after a step and read some steps later, when they have long arrived: each rank then finds the same
    answer after the same step. Where steps are long, and where a process is alone, it is there at once.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, world: World, clock: Callable[[], float] = time.monotonic) -> None:
        self._world = world
        self._clock = clock
        self._sent: tuple[Any, torch.Tensor] | None = None
        self._slower = max(1.0, _ROOM * world.size * _RANK_SECONDS / _SECONDS)  # than few ranks agree
        self._start_anew()

    def _start_anew(self) -> None:
        """With the first two steps as though they were long: they can be, though a first batch was there already."""
        self._until, self._at_once, self._is_paced = 1, True, False
        self._steps, self._since = 0, self._clock()

    def after_step(self, wishes: Callable[[], Wishes]) -> Wishes:
        """What all ranks do after this step; every rank calls it after each."""
        if self._world.size == 1:
            return wishes()
        self._steps += 1
        if self._steps < self._until:
            return NOTHING
        found = self._received()
        wish, each = wishes(), (self._clock() - self._since) / self._steps
        wish = Wishes(wish.stop, wish.log and not found.log, wish.save and not found.save)  # those are done next
        self._since, self._steps = self._clock(), 0
        pause = self._slower * min(float(_MOST_STEPS), _SECONDS / max(each, 1e-9)) if self._is_paced else 0.0
        self._is_paced = True
        values = torch.tensor([wish.stop, wish.log, wish.save, -pause], dtype=torch.float64)
        self._sent = (self._world.largest_later(values), values)
        return self._received() if self._at_once else found

    def _received(self) -> Wishes:
        if not self._sent:
            return NOTHING
        work, values = self._sent
        work.wait()
        self._sent = None
        stop, log, save, pause = values.tolist()
        self._until, self._at_once = max(1, int(-pause)), -pause < _SECONDS / _LONG_SECONDS
        return Wishes(bool(stop), bool(log), bool(save))

    def pace_changes(self) -> None:
        """What comes next takes another time than steps so far; on all ranks at the same place."""
        self.finish()
        self._start_anew()

    def finish(self) -> None:
        """Take in what is still under way: every rank has sent it."""
        self._received()
