"""Families as Prometheus's text. What stays the same from scrape to scrape is kept: only what is new is written."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from hotloop.monitor.families import Family

_NOUGHT = "0.0"


@dataclass(frozen=True)
class _Kept:
    """A family's text.

    Attributes:
        labels: the values of each series' labels, for which it holds.
        pattern: all lines, with %s for each series' number.
        numbers: of the last scrape, which `text` holds. Limits and errors stay the same for days.
    """

    labels: tuple[tuple[str, ...], ...]
    pattern: str
    numbers: tuple[float, ...]
    text: str


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
            if kept is None or kept.labels != labels or kept.numbers != numbers:
                pattern = kept.pattern if kept and kept.labels == labels else self._pattern(family, labels)
                text = pattern % tuple(map(_written, numbers))
                kept = self._kept[family.name] = _Kept(labels, pattern, numbers, text)
            parts.append(kept.text)
        parts.append(self._end)
        return "".join(parts).encode()

    def _pattern(self, family: Family, labels: tuple[tuple[str, ...], ...]) -> str:
        blank = Family(family.name, family.words, family.labels, [(values, 0.0) for values in labels])
        # Not splitlines(): a label may hold what Unicode takes for the end of a line.
        lines = self._encode(_These(blank.metric())).decode().removesuffix(self._end).split("\n")[:-1]
        begin = len(lines) - len(labels)
        lines = [line.replace("%", "%%") for line in lines]
        series = [f"{line.removesuffix(_NOUGHT)}%s" for line in lines[begin:]]
        return "".join(f"{line}\n" for line in (*lines[:begin], *series))


def _written(number: float) -> str:
    """As prometheus_client writes it, which asks much of each number; of most, Python's own text is right."""
    if -1e6 < number < 1e6:
        return repr(float(number))
    return floatToGoString(number)  # type: ignore[no-untyped-call,no-any-return]


class _These(Collector):
    def __init__(self, *metrics: Metric) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics
