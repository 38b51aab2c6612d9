"""How a batch's images are divided between the workers and a decoder of the device."""

import math
from statistics import median

_BATCHES = 4
"""Over which is measured; as many again go by until a change is seen, as those are under way."""
_EARLY, _LATE, _FULL = 0.002, 0.01, 0.98
"""Shares of the time: up to which the workers count as early, and from which on as late, as a step is on its way while
they are waited for; and from which on the decoder counts as always at work."""
_MORE, _MOVED = 1 / 32, 1 / 4
"""By which the images of workers grow that are early; and how much of a batch is moved at once, as they may have been
late for once."""
_BACK = 1 / 8
"""Of its images that go back to early workers from a decoder that is always at work."""


class Split:
    """Finds how many images of a batch the decoder should take, while the training runs.

    As few as let the workers be just in time: what the decoder does on the device may hold up the step, and beside a
    step it may be slow itself.

    Attributes:
        count: images of a batch that the decoder takes; a quarter of them at first.
    """

    def __init__(self, batch_size: int) -> None:
        self.count = -(-batch_size // 4)
        self._batch_size = batch_size
        self._seen: list[tuple[float, float]] = []

    def saw(self, seconds: float, waited: float, decoded: float) -> None:
        """A batch is there.

        Args:
            seconds: since the one before was.
            waited: of those, for the workers.
            decoded: that the decoder was at work on it.
        """
        self._seen.append((waited / seconds, decoded / seconds))
        if len(self._seen) < 2 * _BATCHES:
            return
        late, busy = (median(each) for each in zip(*self._seen[_BATCHES:], strict=True))
        self._seen.clear()
        if late > _LATE:
            most = self.count + math.ceil(_MOVED * self._batch_size)
            self.count = max(self.count, min(most, self._for_late_workers(late, busy)))
        elif late < _EARLY:
            more = _MORE * (self._batch_size - self.count) if busy < _FULL else _BACK * self.count
            self.count = max(0, self.count - max(1, math.ceil(more)))

    def _for_late_workers(self, late: float, busy: float) -> int:
        """So many that the rest is done in time; or, if that is too many, that both are done at the same time."""
        kept = self._batch_size - self.count
        in_time = self.count + math.ceil((late - _EARLY) * kept)
        if not busy:
            return in_time
        workers, decoder = kept, _FULL * self.count / busy  # images in the time of a batch
        return min(in_time, math.floor(self._batch_size * decoder / (workers + decoder)))
