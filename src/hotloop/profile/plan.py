"""How much of a script is measured."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        steps: under each condition; 0: as many as take `seconds`.
        seconds: under each condition, about.
        trace_steps: in the trace, at least.
        ablate: whether parts are left out; what is trained meanwhile is of no use.
        stop: whether the script is ended afterwards.
    """

    steps: int = 0
    seconds: float = 6.0
    trace_steps: int = 6
    ablate: bool = True
    stop: bool = True
