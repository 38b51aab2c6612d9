"""How a launch stands, in the same words for every engine."""

from dataclasses import dataclass
from typing import Literal

State = Literal["waiting", "running", "saved", "finished", "failed", "cancelled", "lost", "unknown"]

ENDED: tuple[State, ...] = ("saved", "finished", "failed", "cancelled", "lost")
"""Nothing more happens by itself. Saved: stopped early, and nobody starts it again. Lost: the engine knows of none.
Unknown, which is no end: it cannot be asked.
"""


@dataclass(frozen=True)
class Status:
    """How a launch stands.

    Attributes:
        reason: why it waits or has ended, in the engine's words or ours; may be empty.
        hosts: that it runs on, as the engine names them; empty while it does not run.
        starts: how often it was started; 0 where the engine does not tell.
    """

    state: State
    reason: str = ""
    hosts: str = ""
    starts: int = 0

    @property
    def ended(self) -> bool:
        """Whether nothing more happens by itself."""
        return self.state in ENDED


def exit_code(state: State) -> int:
    """Of a command that has waited for the end."""
    return {"finished": 0, "saved": 75}.get(state, 1)
