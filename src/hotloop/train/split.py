"""How a batch's images are divided between the workers and a decoder of the device."""

from statistics import median

from hotloop.data.stages import Stages

_BATCHES = 4
"""Over which is measured; as many again go by until a change is seen, as those are under way."""
_LOAD = 0.9
"""Share of the time that workers may be at work, so that one image that takes longer does not make them late."""


class Split:
    """Finds how many images of a batch the decoder should take, while the training runs.

    As few as let the workers be in time with some to spare, as what the decoder does on the device takes time from the
    step; but not so many that it would need longer than they do.

    Args:
        workers: that prepare a batch's samples side by side.

    Attributes:
        count: images of a batch that the decoder takes; a quarter of them at first.
    """

    def __init__(self, batch_size: int, workers: int) -> None:
        self.count = batch_size // 4
        self._batch_size = batch_size
        self._workers = workers
        self._seen: list[tuple[float, float, float, float]] = []
        self._image, self._decoder = 0.0, 0.0

    def saw(self, seconds: float, took: Stages) -> None:
        """A batch is there.

        Args:
            seconds: since the one before was.
            took: what its way took.
        """
        self._seen.append((seconds - took.late, took.reading, took.working, took.decoding))
        if len(self._seen) < 2 * _BATCHES:
            return
        needed, reading, working, decoding = (median(each) for each in zip(*self._seen[_BATCHES:], strict=True))
        self._seen.clear()
        kept = self._batch_size - self.count
        read = reading / self._workers
        if kept:
            self._image = (working - reading) / self._workers / kept
        if self.count:
            self._decoder = decoding / self.count
        # What workers read and decode, `read` + kept * `_image`, is done in time; or when the decoder has the rest.
        in_time = (_LOAD * needed - read) / self._image
        together = (self._batch_size * self._decoder - read) / (self._image + self._decoder)
        self.count = self._batch_size - min(self._batch_size, max(0, round(max(in_time, together))))
