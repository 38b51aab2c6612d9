"""How a batch's images are divided between the workers and a decoder of the device."""

import math
from statistics import median

_BATCHES = 4
"""Over which is measured; as many again go by until a change is seen, as those are under way."""
_LATE, _FULL = 0.02, 0.98
"""Shares of the time: from which on the workers count as late, and the decoder as always at work."""
_BACK = 1 / 32
"""Of its images that a decoder gives back which is always at work."""


class Split:
    """Finds how many images of a batch the decoder should take, while the training runs.

    Workers that are late leave more to the decoder while that has time; a decoder that is always at work takes fewer.
    Where the step is slower than both, nothing changes.

    Attributes:
        count: images of a batch that the decoder takes; half of them at first.
    """

    def __init__(self, batch_size: int) -> None:
        self.count = -(-batch_size // 2)
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
            self.count = max(self.count, self._for_late_workers(late, busy))
        elif busy > _FULL:
            self.count -= math.ceil(_BACK * self.count)

    def _for_late_workers(self, late: float, busy: float) -> int:
        """So many that the rest is done in time; or, if that is too many, that both are done at the same time."""
        kept = self._batch_size - self.count
        in_time = self.count + math.ceil(late * kept)
        if not busy:
            return in_time
        workers, decoder = kept, _FULL * self.count / busy  # images in the time of a batch
        return min(in_time, math.floor(self._batch_size * decoder / (workers + decoder)))
