"""What `--deep` measured."""

from collections.abc import Iterator

from hotloop.doctor.expect import ALL_REDUCE, DECODE, DISK_READ, TENSORFLOW
from hotloop.doctor.finding import Check, Seen
from hotloop.doctor.record import MachineRecord

_SLOW = {ALL_REDUCE: ("all-reduce-slow", 0.7), DECODE: ("decode-slow", 0.5), DISK_READ: ("disk-slow", 0.5)}
"""Of rates that are no card's, by how they begin: the finding, and which share of what is expected is too little.
Links that carry nothing cost more than that; processors and disks differ.
"""
_CARD_SLOW = "probe-slow", 0.8
"""Cards of one kind differ by a few percent; a probe beside other work by more."""


def rates(record: MachineRecord) -> Iterator[Seen]:
    """Errors and shortfalls."""
    for rate in record.rates:
        where = f"GPU {rate.gpu}, {rate.name}" if rate.gpu is not None else rate.name
        if rate.error:
            wrong = rate.error.startswith("wrong result")
            yield Seen("probe-wrong" if wrong else "probe-failed", f"{where}: {rate.error}")
        elif rate.name == TENSORFLOW and rate.expected:
            if (rate.value or 0) < rate.expected:
                seen = f"TensorFlow sees {rate.value:g} of {rate.expected:g} GPUs ({rate.source})"
                yield Seen("tensorflow-gpus-missing", f"{seen}: {rate.said or 'it does not say why'}")
        elif rate.value is not None and rate.expected:
            found, least = next((slow for name, slow in _SLOW.items() if rate.name.startswith(name)), _CARD_SLOW)
            share = f"{rate.value:.4g} {rate.unit}, {rate.value / rate.expected:.2f} of {rate.expected:.4g}"
            if rate.value < least * rate.expected:
                yield Seen(found, f"{where}: {share} ({rate.source})")


CHECKS: tuple[Check, ...] = (rates,)
