"""Starts in a row that have saved nothing, counted by what is started where the engine counts none: Kubernetes starts
again whatever exits with 75, as often as it does.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hotloop.core.errors import InputError
from hotloop.core.files import write_atomic

STARTS = "HOTLOOP_STARTS"
"""Environment variable: the file in which starts are counted, where the next one finds it."""
MOST = 5
"""So many in a row are the last; a cluster that is short of machines may take away several before they begin."""


def count_start(file: Path, checkpoints: Path) -> None:
    """Note a start. It is worth it if one of those before it has saved something.

    Args:
        checkpoints: the folder in which the run's lie.

    Raises:
        InputError: too many in a row have saved nothing, so that the engine starts no other.
    """
    before = _read(file)
    saved = sorted(path.name for path in checkpoints.glob("[!.]*"))
    fruitless = before["fruitless"] + 1 if before.get("saved") == saved else 0
    if fruitless >= MOST:
        raise InputError(
            f"{MOST} starts in a row have saved nothing",
            "each was stopped before it could, and another would be",
            "hotloop launch logs NAME says by what; a longer launch.kubernetes.grace, or checkpoint.every more often",
        )
    with suppress(OSError):  # a full disk stops the run where something is lost by it
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, json.dumps({"saved": saved, "fruitless": fruitless}) + "\n")


def _read(file: Path) -> Mapping[str, Any]:
    """What was noted; nothing if it cannot be read."""
    try:
        found = json.loads(file.read_text())
        return {"saved": list(found["saved"]), "fruitless": int(found["fruitless"])}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
