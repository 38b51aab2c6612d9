"""What a launch's settings will do that nobody wants; it is launched all the same."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LaunchFinding:
    """One of them.

    Attributes:
        id: stable.
        what: what was found.
        fix: what to type or remove.
    """

    id: str
    what: str
    fix: str
