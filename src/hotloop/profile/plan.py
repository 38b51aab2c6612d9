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
        tool: another profiler that records the steps in place of us, see `external`; empty: none.
        progress: whether what is being done is told on the error output.
        stop: whether the script is ended afterwards.
    """

    steps: int = 0
    seconds: float = 6.0
    trace_steps: int = 6
    ablate: bool = True
    tool: str = ""
    progress: bool = False
    stop: bool = True
