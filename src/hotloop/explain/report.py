"""What was found in a log, joined with the machine: what a command prints."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hotloop.doctor.examine import examine
from hotloop.doctor.record import MachineRecord
from hotloop.explain.causes import causes
from hotloop.explain.decide import Found
from hotloop.explain.lines import Line

_AREAS = {
    "torch/utils/data": "data loading",
    "torch/distributed": "several processes",
    "torch/_inductor": "compilation",
    "torch/_dynamo": "compilation",
    "triton/": "compilation",
    "torch/cuda": "driver and architecture",
    "tensorflow/": "TensorFlow",
    "torch/nn": "the model's code",
    "torch/autograd": "the model's code",
}
"""Where a traceback leads -> the area that its error is likely of."""


@dataclass(frozen=True)
class Explained:
    """A cause as it is told.

    Attributes:
        evidence: lines of the log.
        notes: arithmetic and the like.
        machine: what this machine's findings add.
    """

    id: str
    title: str
    area: str
    confidence: float
    evidence: tuple[Line, ...]
    notes: tuple[str, ...]
    machine: tuple[str, ...]
    why: str
    fix: str


def explained(found: Sequence[Found], machine: Callable[[], MachineRecord] | None) -> list[Explained]:
    """Each cause with its words; the first one with what the machine has to say of it.

    Args:
        machine: reads it; called if the first cause is one that a machine can tell of. None: it is left out.
    """
    told = [_told(one) for one in found]
    if not told or machine is None or not causes()[told[0].id].findings:
        return told
    ids = causes()[told[0].id].findings
    here = [one for one in examine(machine()) if one.id in ids]
    if not here:
        return told
    said = tuple(f"{one.title}: {one.evidence} [{one.id}]" for one in here)
    first = told[0]
    joined = Explained(**{**vars(first), "machine": said, "fix": here[0].fix})
    return [joined, *told[1:]]


def _told(found: Found) -> Explained:
    cause = causes()[found.id]
    return Explained(
        found.id, cause.title, cause.area or _area(found), found.confidence, found.evidence, found.notes, (),
        cause.why, cause.fix,
    )  # fmt: skip


def _area(found: Found) -> str:
    """Of an error that is not known: by the deepest known place of its traceback."""
    for line in reversed(found.context):
        for part, area in _AREAS.items():
            if part in line.text:
                return area
    return "the script"
