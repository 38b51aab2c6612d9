"""Ranks average their gradients after backward, in a captured step, or while it runs: the faster way is found out."""

import statistics
import time
from collections.abc import Callable

import torch

from hotloop.train.gradients import Gradients
from hotloop.train.ranks import Ranks

_SETTLE, _TIMED = 10, 5
"""Windows of each way: first those in which compilation, cuDNN's search and captures happen, then those that count."""
_OVER = 2 * (_SETTLE + _TIMED)
_MESSAGES = 3
_LITTLE = 0.03
"""Share of a window that messages may take without the other way being tried: it hides no more than that, has no graph,
and compiles the model once more. A ResNet-50's take 0.5 of 31 ms on four H200s."""


class Trial:
    """Averages gradients after backward; if messages take long, it tries some windows during backward, too, and stays
    with the faster way.

    `DistributedDataParallel` averages gradients while backward runs, but what its hooks send cannot be captured
    reliably: it wants to be made on the stream of the capture, all ranks would have to replay alike, and a graph that
    still holds such messages lets `destroy_process_group` wait for ever
    (https://github.com/pytorch/pytorch/issues/115388). The compiler, too, cuts the model wherever a message is to
    leave. Averaged after backward, between two graphs, none of that matters, and the host launches next to nothing; but
    nothing hides the time of the message. Large models on a slow network lose.

    Args:
        obstacle: why this rank cannot average them after backward, asked before that is tried; empty if it can.
        message: averages once more what the last window has averaged, whatever becomes of it.
        stay: called with the reason when gradients are averaged during backward after all.
        clock: seconds, once the device is idle.
    """

    def __init__(
        self, ranks: Ranks, obstacle: Callable[[], str], message: Callable[[], None], stay: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._ranks = ranks
        self._obstacle, self._message, self._stay = obstacle, message, stay
        self._clock = clock
        self._begun = False
        self._windows = 0
        self._seconds: dict[bool, list[float]] = {False: [], True: []}
        self._started = 0.0

    @property
    def over(self) -> bool:
        """Whether it is decided."""
        return self._windows >= _OVER

    def begin(self) -> None:
        """A window starts; all ranks call this for the same one."""
        if not self._begun:
            self._begun = True
            self._begin_after()
        if self._ranks.apart and self._ranks.joins:
            self.give_up("ranks join")
        if self._is_timed:
            self._started = self._clock()

    def end(self) -> bool:
        """It is done, on the host; all ranks call this for the same window. Whether the other way is taken now."""
        if self.over:
            return False
        if self._is_timed:
            self._seconds[self._ranks.apart].append(self._clock() - self._started)
        self._windows += 1
        before = self._ranks.apart
        if self._windows == _SETTLE + _TIMED:
            self._end_after()
        elif self._windows == _OVER:
            self._end_during()
        return self._ranks.apart != before

    def _begin_after(self) -> None:
        """All ranks, or none: what is in the way may be on one of them."""
        own = self._obstacle()
        if self._ranks.largest([float(bool(own))])[0]:
            self.give_up(own or "another rank says why")
        else:
            self._ranks.average_apart(True)

    def _end_after(self) -> None:
        self._message()  # ranks meet
        started = self._clock()
        for _ in range(_MESSAGES):
            self._message()
        own = (self._clock() - started) / _MESSAGES
        message, window = self._ranks.largest([own, statistics.median(self._seconds[True])])
        if message <= _LITTLE * window:
            self._windows = _OVER
        else:
            self._ranks.average_apart(False)

    def _end_during(self) -> None:
        during, after = self._ranks.largest([statistics.median(self._seconds[way]) for way in (False, True)])
        if during < after:
            self.give_up(
                f"gradients averaged while backward runs take {1000 * during:.2f} ms a step, captured and averaged "
                f"after it {1000 * after:.2f} ms"
            )
        else:
            self._ranks.average_apart(True)

    def give_up(self, reason: str) -> None:
        """Average during backward for good."""
        self._windows = _OVER
        self._ranks.average_apart(False)
        self._stay(reason)

    def restart(self) -> None:
        """The work of a window has changed."""
        if not self.over:
            self._windows, self._seconds = 0, {False: [], True: []}
            self._ranks.average_apart(True)

    @property
    def _is_timed(self) -> bool:
        return not self.over and self._windows % (_SETTLE + _TIMED) >= _SETTLE


def start_trial(ranks: Ranks, gradients: Gradients, give_up: Callable[[str], None]) -> Trial | None:
    """A trial for these ranks; None where there is one alone, or no choice.

    Args:
        give_up: called with the reason where nothing is to be captured.
    """
    if not ranks.several:
        return None
    if not ranks.have_ddp:
        give_up("ranks talk to each other without DistributedDataParallel")
        return None

    def message() -> None:
        assert gradients.flat is not None
        ranks.average(gradients.flat.tensors)

    return Trial(ranks, lambda: ranks.obstacle(gradients.parameters()), message, give_up, _when_idle)


def _when_idle() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()
