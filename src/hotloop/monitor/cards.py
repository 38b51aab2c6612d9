"""All cards of a host, each read on a thread of its own with a limit: one that hangs costs its own figures alone."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hotloop.core.xids import Xids
from hotloop.monitor.card import CardReader, user_of
from hotloop.monitor.limited import Limited
from hotloop.monitor.reading import Card, CardsReading, Driver

_LIMIT_SECONDS = 2.0
_TURN_SECONDS = 0.005
"""For a card before the next is asked, too. Each call of the driver gives Python's lock away: with eight threads after
it half of a scrape's time on processors was their changing places.
"""


class Cards:
    """Reads the cards of this host.

    Args:
        nvml: the module pynvml.
        limit_seconds: for all cards, and for the driver's start; a scrape waits no longer than both.
    """

    def __init__(
        self, nvml: Any, limit_seconds: float = _LIMIT_SECONDS, clock: Callable[[], float] = time.monotonic,
        user_of: Callable[[int], str] = user_of,
    ) -> None:  # fmt: skip
        self._nvml, self._limit, self._clock, self._user_of = nvml, limit_seconds, clock, user_of
        self._start = Limited(self._open, "driver")
        self._driver: Driver | None = None
        self._readers: list[tuple[CardReader, Limited[Card]]] = []
        self._xids: Xids | None = None

    def read(self) -> CardsReading:
        """Read them; tries anew to start a driver that did not start before."""
        if self._driver is None:
            self._start.start()
            try:
                self._driver, count = self._start.finish(self._limit)
            except self._nvml.NVMLError as error:
                # A host without the library has no cards, and nothing is wrong with it.
                return CardsReading(failures=int(error.value != self._nvml.NVML_ERROR_LIBRARY_NOT_FOUND))
            except (OSError, TimeoutError):
                return CardsReading(failures=1)
            self._start.close()
            readers = [CardReader(self._nvml, index, self._user_of, self._clock) for index in range(count)]
            self._readers = [(reader, Limited(reader.read, f"card {index}")) for index, reader in enumerate(readers)]
            self._xids = Xids(self._nvml, range(count))
        for _, limited in self._readers:
            limited.start()
            limited.settle(_TURN_SECONDS)
        until = self._clock() + self._limit
        cards = tuple(self._card(index, until) for index in range(len(self._readers)))
        return CardsReading(self._driver, cards, sum(not card.answers for card in cards))

    def close(self) -> None:
        """End all threads that do not hang. The driver's resources end with the process."""
        for _, limited in self._readers:
            limited.close()
        self._start.close()
        if self._xids:
            self._xids.close()

    def _open(self) -> tuple[Driver, int]:
        nvml = self._nvml
        nvml.nvmlInit()
        cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()
        version = nvml.nvmlSystemGetDriverVersion()
        return Driver(version, f"{cuda // 1000}.{cuda % 1000 // 10}"), nvml.nvmlDeviceGetCount()

    def _card(self, index: int, until: float) -> Card:
        reader, limited = self._readers[index]
        assert self._xids
        xids, times = self._xids.of(index)
        try:
            card = limited.finish(until - self._clock())
        except Exception:  # whatever it is, it is this card's alone, and counted
            card = Card(index, reader.uuid, answers=False)
        return replace(card, xids=xids, xid_times=times) if xids else card
