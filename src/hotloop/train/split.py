"""How a batch's images are divided between the workers and a decoder of the device."""

from statistics import median

_BATCHES = 4
"""Over which is measured; as many again go by until a change is seen, as those are under way."""
_STEPS = 32
"""A change is so many parts of a batch."""
_LATE, _BUSY, _OVERRUN = 0.02, 0.85, 0.95


class Split:
    """Finds how many images of a batch the decoder should take, while the training runs.

    Workers that are late leave more to the decoder while that has time; a decoder that is always at work takes fewer.
    Where the step is slower than both, nothing changes.

    Attributes:
        count: images of a batch that the decoder takes.
    """

    def __init__(self, batch_size: int, count: int) -> None:
        self.count = min(batch_size, count)
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
        change = max(1, self._batch_size // _STEPS)
        if late > _LATE and busy < _BUSY:
            self.count = min(self._batch_size, self.count + change)
        elif late < _LATE and busy > _OVERRUN:
            self.count = max(0, self.count - change)
