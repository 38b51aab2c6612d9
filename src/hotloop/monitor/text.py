"""Families as Prometheus's text. What stays the same from scrape to scrape is kept: only numbers are written anew."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from hotloop.monitor.families import Family

_NOUGHT = "0.0"


@dataclass(frozen=True)
class _Kept:
    """A family's text without its numbers.

    Attributes:
        labels: the values of each series' labels, for which it holds.
        head: the lines before the series.
        series: the text of each up to its number.
    """

    labels: tuple[tuple[str, ...], ...]
    head: str
    series: tuple[str, ...]


class Text:
    """Writes families in one format; of each family the last text is kept, so jobs that end leave nothing.

    Names, words and labels are written by prometheus_client, which takes 5 µs a series: too much for each scrape of a
    host whose series are the same as before. For any thread.

    Args:
        encode: of prometheus_client: `generate_latest`, or what `choose_encoder` gives.
    """

    def __init__(self, encode: Callable[[Collector], bytes]) -> None:
        self._encode = encode
        self._end = encode(_These()).decode()
        self._kept: dict[str, _Kept] = {}

    def write(self, families: Iterable[Family]) -> bytes:
        """The bytes that `encode` would make of them; families have a row at least."""
        parts = []
        for family in families:
            labels, numbers = zip(*family.rows, strict=True)
            kept = self._kept.get(family.name)
            if kept is None or kept.labels != labels:
                kept = self._kept[family.name] = self._of(family, labels)
            parts.append(kept.head)
            for series, number in zip(kept.series, numbers, strict=True):
                parts += (series, floatToGoString(number), "\n")  # type: ignore[no-untyped-call]
        parts.append(self._end)
        return "".join(parts).encode()

    def _of(self, family: Family, labels: tuple[tuple[str, ...], ...]) -> _Kept:
        blank = Family(family.name, family.words, family.labels, [(values, 0.0) for values in labels])
        # Not splitlines(): a label may hold what Unicode takes for the end of a line.
        lines = self._encode(_These(blank.metric())).decode().removesuffix(self._end).split("\n")[:-1]
        begin = len(lines) - len(labels)
        head = "".join(f"{line}\n" for line in lines[:begin])
        return _Kept(labels, head, tuple(line.removesuffix(_NOUGHT) for line in lines[begin:]))


class _These(Collector):
    def __init__(self, *metrics: Metric) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics
