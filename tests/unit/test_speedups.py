"""What is told of a script that was run faster, from what its processes have left."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hotloop.accelerate import script
from hotloop.accelerate.plan import Plan
from hotloop.attach.command import Ended
from hotloop.attach.inside import Attachment
from hotloop.cli.run import _lines
from hotloop.core.speedup import Speedup

LEFT = {
    "rank": 0, "device": "cpu", "steps": 200, "before_seconds": 2.0, "after_seconds": 1.0, "relative_error": 0.1,
    "accelerations": [], "notes": [], "memory": {},
}  # fmt: skip


def told(monkeypatch: pytest.MonkeyPatch, *left: dict[str, Any]) -> Speedup:
    def run(command: Any, attachment: Attachment, *_: Any) -> Ended:
        for number, one in enumerate(left):
            (Path(attachment.folder) / f"speedup-{number}.json").write_text(json.dumps({**LEFT, **one}))
        return Ended(0, frozenset(), entered=True)

    monkeypatch.setattr(script, "run_attached", run)
    return script.run_script(["train"], Plan(()), os.environ)


@pytest.mark.parametrize(("second", "note"), [(0, "2 processes trained: this is the one with most steps"), (1, "")])
def test_trainings_one_after_the_other_are_no_ranks(monkeypatch: pytest.MonkeyPatch, second: int, note: str) -> None:
    found = told(monkeypatch, {}, {"rank": second, "steps": 100})
    assert (found.steps, "".join(found.notes)) == (200, note)


@pytest.mark.parametrize(
    ("left", "text"),
    [
        ({}, "2.00 ± 0.20 times as fast"),
        ({"before_seconds": 1.0, "relative_error": 0.0}, "nothing made a step of 1.0 s shorter"),
        ({"after_seconds": 0.0, "relative_error": 0.0}, "it ended before anything was timed"),
    ],
)
def test_no_ratio_is_told_that_was_not_measured(
    monkeypatch: pytest.MonkeyPatch, left: dict[str, Any], text: str
) -> None:
    _, told_first, *_ = _lines(told(monkeypatch, left))
    assert text in told_first
