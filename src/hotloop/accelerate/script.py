"""Run a script with accelerations: start it, and tell what became of it."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hotloop.accelerate.plan import FAST, Plan, kind_of
from hotloop.attach.command import NOT_ENTERED, run_attached
from hotloop.attach.inside import Attachment
from hotloop.core.speedup import Acceleration, Speedup

_ENTRIES = {
    "torch": "hotloop.accelerate.runner:begin",
    "tensorflow": "hotloop.accelerate.tensorflow_runner:begin",
}


def run_script(
    command: Sequence[str], plan: Plan, environment: Mapping[str, str], output: int | None = None
) -> Speedup:
    """Run a command to its end, accelerated.

    Args:
        output: a file descriptor for what the command writes to its standard output, in place of ours.

    Raises:
        InputError: there is no such program.
    """
    with tempfile.TemporaryDirectory(prefix="hotloop-") as name:
        folder = Path(name)
        ended = run_attached(command, Attachment(_ENTRIES, name, asdict(plan)), environment, output)
        found: list[dict[str, Any]] = [json.loads(file.read_bytes()) for file in folder.glob("speedup-*.json")]
        trained = any(folder.glob("trains-*"))
    level = FAST if any(kind_of(each).level == FAST for each in plan.names) else "exact"
    if not found and trained:
        note = "what was accelerated is not known: the process that trained was ended at once, by os._exit or a signal"
        return Speedup(tuple(command), level, ended.code, notes=(note,))
    if not found:
        why = "no training was seen" if ended.entered else NOT_ENTERED
        return Speedup(tuple(command), level, ended.code, notes=(f"nothing was accelerated: {why}",))
    longest = max(found, key=lambda one: int(one["steps"]))
    trainings = sum(not one["rank"] for one in found)
    accelerations = tuple(Acceleration(**one) for one in longest.pop("accelerations"))
    notes = tuple(longest.pop("notes"))
    if trainings > 1:
        notes += (f"{trainings} processes trained: this is the one with most steps",)
    del longest["rank"]
    return Speedup(tuple(command), level, ended.code, accelerations=accelerations, notes=notes, **longest)
