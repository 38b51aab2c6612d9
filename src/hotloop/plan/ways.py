"""Footprints of a job, traced when they are asked for, and what other batches need."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

from hotloop.plan.footprint import Footprint, State, scaled
from hotloop.plan.trace import Tracer, Way

_MOST = 1 << 20


class Ways:
    """A job's ways to train, each traced with the first batch that is asked for; others are reckoned from that.

    Args:
        least: the smallest batch that the model can be given; also an attribute.
    """

    def __init__(self, tracer: Tracer, least: int) -> None:
        self._tracer = tracer
        self.least = least
        self._traced: dict[Way, Footprint] = {}

    @property
    def state(self) -> State:
        """Of all ways."""
        return self._tracer.state

    def footprint(self, way: Way) -> Footprint:
        """Of a way.

        Raises:
            InputError: activations cannot be recomputed.
            Exception: as `Tracer.trace`.
        """
        batch, kind = max(way.batch, self.least), replace(way, batch=0)
        if kind not in self._traced:
            self._traced[kind] = self._tracer.trace(replace(way, batch=batch))
        found = self._traced[kind]
        return found if found.batch == batch else scaled(found, batch)

    def least_activations(self, way: Way) -> float:
        """Bytes that a way takes at least, as far as what has been traced tells; nothing is traced for it."""
        kinds = (replace(way, batch=0), replace(way, batch=0, divided=True))  # which keeps no copies of weights
        known = [scaled(self._traced[kind], way.batch) for kind in kinds if kind in self._traced]
        return max((moment.activations for one in known for moment in one.passes), default=0.0)

    def largest(self, way: Way, fits: Callable[[Footprint], bool]) -> int:
        """The largest batch that fits; 0 if there is none."""

        def too_large(batch: int) -> bool:
            return not fits(self.footprint(replace(way, batch=batch)))

        return bisect_left(range(self.least, _MOST), True, key=too_large) + self.least - 1
