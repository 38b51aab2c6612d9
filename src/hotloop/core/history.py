"""How often a run has been interrupted: one line of `starts.jsonl` a start."""

import json
from dataclasses import dataclass
from pathlib import Path

from hotloop.core.files import write_atomic


@dataclass(frozen=True)
class History:
    """Of a run so far.

    Attributes:
        seconds: for which its earlier starts ran.
        interruptions: how many of them were killed, preempted or stopped, or failed.
    """

    seconds: float = 0.0
    interruptions: int = 0

    def expected_seconds(self, guess: float) -> float:
        """Between two interruptions, if they come at random: the guess counts as one interruption in that time.

        The mean of the posterior of an exponential distribution's scale under a conjugate prior (Gelman et al.,
        "Bayesian Data Analysis", 2.6) worth one observation.
        """
        return (guess + self.seconds) / (1 + self.interruptions)


def read_history(file: Path) -> History:
    """What is noted there; lines that are no such notes are left out."""
    found = History()
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            start = json.loads(line)
            seconds, interrupted = float(start["ran_seconds"]), bool(start["was_interrupted"])
        except (ValueError, KeyError, TypeError):
            continue
        found = History(found.seconds + seconds, found.interruptions + interrupted)
    return found


def note_start(file: Path, now: float, last_sign: float | None, was_interrupted: bool, launched: str = "") -> None:
    """Add this start.

    Args:
        now: seconds since 1970.
        last_sign: when the start before this one last wrote something; None: there was none.
        was_interrupted: whether that one ended before it had finished.
        launched: by what, as which job of it, and where; empty: by hand.
    """
    lines = file.read_text().splitlines() if file.exists() else []
    ran = 0.0
    if lines and last_sign is not None:
        try:
            ran = max(0.0, last_sign - float(json.loads(lines[-1])["time"]))
        except (ValueError, KeyError, TypeError):
            was_interrupted = False  # a line that cannot be read tells nothing
    start = {"time": now, "ran_seconds": ran, "was_interrupted": bool(lines) and was_interrupted, "launched": launched}
    write_atomic(file, "".join(f"{line}\n" for line in [*lines, json.dumps(start)]))
