"""How a batch's images are divided between the workers and a decoder of the device."""

from collections import deque
from statistics import median

from hotloop.data.stages import Stages

_LOAD = 0.8
"""Share of the time that workers may be at work, so that one image that takes longer does not make them late."""
_LONGER = 0.05
"""Of a step: it becomes so much longer at most from one division to the next. What ranks wait for the latest of them is
not time that this one's workers have."""
_LEAST = 1e-9
"""Seconds of an image; of a batch of damaged ones nothing is decoded."""
_STEPS = 16
"""Over which its length is measured: three or four come at once after a pause."""


class Split:
    """Finds how many images of a batch the decoder should take, while the training runs.

    As few as let the workers be in time with some to spare, as what the decoder does on the device takes time from the
    step; but not so many that it would need longer than they do.

    Args:
        workers: that prepare a batch's samples side by side.
        under_way: batches that go by until a change of `count` is seen; as many again are measured over.

    Attributes:
        count: images of a batch that the decoder takes; a quarter of them at first.
    """

    def __init__(self, batch_size: int, workers: int, under_way: int) -> None:
        self.count = batch_size // 4
        self._batch_size = batch_size
        self._workers = workers
        self._under_way = under_way
        self._seen: list[tuple[float, float, float]] = []
        self._image, self._decoder = 0.0, 0.0
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._step = float("inf")

    def saw(self, seconds: float, took: Stages) -> None:
        """A batch is there.

        Args:
            seconds: since the one before was.
            took: what its way took; `late` if the device was out of work meanwhile.
        """
        self._steps.append(seconds - took.late)
        self._seen.append((took.reading, took.working, took.decoding))
        if len(self._seen) < 2 * self._under_way:
            return
        reading, working, decoding = (median(each) for each in zip(*self._seen[self._under_way :], strict=True))
        self._seen.clear()
        kept = self._batch_size - self.count
        read = reading / self._workers
        # What a side has none of cannot be measured: it is taken to be less each time, until it has some again.
        self._image = max(_LEAST, (working - reading) / self._workers / kept if kept else self._image / 2)
        self._decoder = decoding / self.count if self.count else self._decoder / 2
        step = median(self._steps)
        self._step = min(step, self._step + _LONGER * step)
        # What workers read and decode, `read` + kept * `_image`, is done in time; or when the decoder has the rest.
        in_time = (_LOAD * self._step - read) / self._image
        together = (self._batch_size * self._decoder - read) / (self._image + self._decoder)
        self.count = self._batch_size - min(self._batch_size, max(0, round(max(in_time, together))))
