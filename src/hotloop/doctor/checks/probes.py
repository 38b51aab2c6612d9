"""What `--deep` measured."""

from collections.abc import Iterator

from hotloop.doctor.finding import Check, Seen
from hotloop.doctor.record import MachineRecord

_SLOW = 0.8
"""Of what is expected. Cards of one kind differ by a few percent; a probe beside other work by more."""


def rates(record: MachineRecord) -> Iterator[Seen]:
    """Errors and shortfalls."""
    for rate in record.rates:
        where = f"GPU {rate.gpu}, {rate.name}" if rate.gpu is not None else rate.name
        if rate.error:
            wrong = rate.error.startswith("wrong result")
            yield Seen("probe-wrong" if wrong else "probe-failed", f"{where}: {rate.error}")
        elif rate.value is not None and rate.expected and rate.value < _SLOW * rate.expected:
            share = f"{rate.value:.4g} {rate.unit}, {rate.value / rate.expected:.2f} of {rate.expected:.4g}"
            yield Seen("probe-slow", f"{where}: {share} ({rate.source})")


CHECKS: tuple[Check, ...] = (rates,)
