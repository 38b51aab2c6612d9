"""Ranks average their gradients while backward runs, or after it in a captured step: the faster way is found out."""

import statistics
import time
from collections.abc import Callable

import torch

from hotloop.train.gradients import Gradients
from hotloop.train.ranks import Ranks

_SETTLE, _TIMED = 10, 5
"""Windows of each way: first those in which compilation, cuDNN's search and captures happen, then those that count."""


class Trial:
    """Tries both ways, some windows each, and stays with the faster one.

    `DistributedDataParallel` averages gradients while backward runs, but what its hooks send cannot be captured
    reliably: it wants to be made on the stream of the capture, all ranks would have to replay alike, and a graph that
    still holds such messages lets `destroy_process_group` wait for ever
    (https://github.com/pytorch/pytorch/issues/115388). Averaged after backward, between two graphs, none of that
    matters, and the host launches next to nothing; but nothing hides the time of the message. Small models gain, large
    ones on a slow network lose.

    Args:
        obstacle: why this rank cannot average them after backward, asked before that is tried; empty if it can.
        stay: called with the reason when gradients are averaged during backward after all.
    """

    def __init__(self, ranks: Ranks, obstacle: Callable[[], str], stay: Callable[[str], None]) -> None:
        self._ranks = ranks
        self._obstacle = obstacle
        self._stay = stay
        self._windows = 0
        self._seconds: dict[bool, list[float]] = {False: [], True: []}
        self._started = 0.0

    @property
    def over(self) -> bool:
        """Whether it is decided."""
        return self._windows >= 2 * (_SETTLE + _TIMED)

    def begin(self) -> None:
        """A window starts."""
        if self._ranks.apart and self._ranks.joins:
            self.give_up("ranks join")
        if self._is_timed:
            torch.cuda.synchronize()
            self._started = time.perf_counter()

    def end(self) -> bool:
        """It is done, on the host; all ranks call this for the same window. Whether the other way is taken now."""
        if self._is_timed:
            torch.cuda.synchronize()
            self._seconds[self._ranks.apart].append(time.perf_counter() - self._started)
        self._windows += 1
        before = self._ranks.apart
        if self._windows == _SETTLE + _TIMED:
            self._change_over()
        elif self._windows == 2 * (_SETTLE + _TIMED):
            during, after = self._ranks.largest([statistics.median(self._seconds[way]) for way in (False, True)])
            if during < after:
                self.give_up(
                    f"gradients averaged while backward runs take {1000 * during:.2f} ms a step, captured and averaged "
                    f"after it {1000 * after:.2f} ms"
                )
        return self._ranks.apart != before

    def _change_over(self) -> None:
        """All ranks, or none: what is in the way may be on one of them."""
        own = self._obstacle()
        if self._ranks.largest([float(bool(own))])[0]:
            self.give_up(own or "another rank says why")
        else:
            self._ranks.apart = True
            self._ranks.start_again()

    def give_up(self, reason: str) -> None:
        """Average during backward for good."""
        self._windows, self._ranks.apart = 2 * (_SETTLE + _TIMED), False
        self._ranks.start_again()
        self._stay(reason)

    def restart(self) -> None:
        """The work of a window has changed."""
        if not self.over:
            self._windows, self._ranks.apart = 0, False
            self._seconds = {False: [], True: []}

    @property
    def _is_timed(self) -> bool:
        phase = self._windows // (_SETTLE + _TIMED)
        return phase < 2 and self._windows % (_SETTLE + _TIMED) >= _SETTLE


def start_trial(ranks: Ranks, gradients: Gradients, give_up: Callable[[str], None]) -> Trial | None:
    """A trial for these ranks; None where there is one alone, or no choice.

    Args:
        give_up: called with the reason where nothing is to be captured.
    """
    if not ranks.several:
        return None
    if ranks.averages_during:
        give_up(ranks.averages_during)
        return None
    return Trial(ranks, lambda: ranks.obstacle(gradients.parameters()), give_up)
