"""Which rank is named when none makes progress."""

from dataclasses import replace
from pathlib import Path

import pytest

from hotloop.train import hang
from hotloop.train.heartbeat import Heart
from hotloop.train.world import ALONE


def test_a_rank_that_has_ended_is_not_who_holds_the_others_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang, "_STACKS_SECONDS", 0.0)
    ahead, behind = (Heart(replace(ALONE, rank=rank, size=2, folder=str(tmp_path))) for rank in (0, 1))
    behind.enter("step")
    behind.beat()
    with behind:
        behind.step = 3
    for _ in range(2):
        ahead.beat()
    ahead.enter("ending")
    with ahead:
        watch = hang.Watch(tmp_path, 0.0)
        named = watch.hung()
    assert named.startswith("rank 0 makes no progress")
    assert named.endswith("ending after 0 steps")
    assert "rank 1: ended after 3 steps" in watch.report
