"""This machine."""

from hotloop.monitor.cards import Cards
from hotloop.monitor.jobs import jobs_here
from hotloop.monitor.reading import CardsReading, JobsReading


class ThisHost:
    """The cards of this machine, and the jobs of it that this user may see."""

    def __init__(self) -> None:
        import pynvml  # not above: an invented host needs none

        self._cards = Cards(pynvml)

    def cards(self) -> CardsReading:
        """All cards."""
        return self._cards.read()

    def jobs(self) -> JobsReading:
        """All jobs."""
        return jobs_here()

    def close(self) -> None:
        """End the threads that read cards."""
        self._cards.close()
