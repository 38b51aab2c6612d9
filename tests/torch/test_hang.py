"""Which rank is named when none makes progress."""

import errno
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

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


def test_a_first_step_that_compiles_has_more_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: None)
    monkeypatch.setattr(hang, "time", clock)
    with Heart(replace(ALONE, size=2, folder=str(tmp_path))) as heart:
        watch = hang.Watch(tmp_path, 10.0)
        moments = [(0.0, 0, False), (29.0, 0, False), (31.0, 0, True), (40.0, 1, False), (51.0, 1, True)]
        for now[0], heart.step, hangs in moments:
            heart._beats = 1 + heart.step  # it has read a checkpoint
            heart._write()
            assert bool(watch.hung()) == hangs, now


def test_a_time_for_which_all_were_suspended_is_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(hang, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: None))
    with Heart(replace(ALONE, size=2, folder=str(tmp_path))) as heart:
        heart.step = 1
        heart.beat()
        heart._write()
        watch = hang.Watch(tmp_path, 10.0)
        assert watch.hung() == ""
        now[0] = 1000.0
        watch.forgive(998.0)
        assert watch.hung() == ""
        now[0] = 1009.0
        assert watch.hung().startswith("rank 0 makes no progress")


def test_ranks_that_go_on_while_their_stacks_are_asked_for_do_not_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Heart(replace(ALONE, size=2, folder=str(tmp_path))) as heart:

        def goes_on(seconds: float) -> None:
            heart.beat()
            heart._write()

        monkeypatch.setattr(hang, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=goes_on))
        watch = hang.Watch(tmp_path, 0.0)
        assert watch.hung() == ""
        monkeypatch.setattr(hang.time, "sleep", lambda seconds: None)
        assert watch.hung().startswith("rank 0 makes no progress")


def test_a_machine_whose_ranks_wait_lets_another_one_say_first_who_holds_all_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Heart(replace(ALONE, size=2, folder=str(tmp_path))) as heart:
        heart.beat()
        heart._write()
        monkeypatch.setattr(hang, "_STACKS_SECONDS", 0.0)
        monkeypatch.setattr(hang, "_waits", lambda stack: False)
        assert hang.Watch(tmp_path, 0.0, lambda moved: 0).hung().startswith("rank 0 makes no progress")
        monkeypatch.setattr(hang, "_waits", lambda stack: True)
        watch = hang.Watch(tmp_path, 0.0, lambda moved: 0)
        assert watch.hung() == ""
        assert watch.hung() == ""
        monkeypatch.setattr(hang, "_OTHERS_SECONDS", 0.0)
        assert watch.hung().endswith("; it waits, as all of this machine do")


def test_progress_of_another_machine_is_none_of_a_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([1, 2, 2, 2])
    told: list[bool] = []

    def elsewhere(moved: bool) -> int:
        told.append(moved)
        return next(counts)

    monkeypatch.setattr(hang, "_STACKS_SECONDS", 0.0)
    monkeypatch.setattr(hang, "_waits", lambda stack: False)
    clock = iter(range(0, 1000, 20))
    monkeypatch.setattr(hang, "time", SimpleNamespace(monotonic=lambda: float(next(clock)), sleep=lambda seconds: None))
    with Heart(replace(ALONE, size=2, folder=str(tmp_path))) as heart:
        heart.step = 1
        heart.beat()
        heart._write()
        watch = hang.Watch(tmp_path, 30.0, elsewhere)
        assert [bool(watch.hung()) for _ in range(4)] == [False, False, False, True]
    assert told[:2] == [True, False]


def test_a_later_question_is_answered_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the ranks did when they were asked before is not what they do now."""
    monkeypatch.setattr(hang, "_STACKS_SECONDS", 0.0)
    with Heart(replace(ALONE, size=2, folder=str(tmp_path))) as heart:
        heart.beat()
        heart._write()
        stacks = hang.stacks_file(tmp_path, 0)
        for _ in range(2):
            hang.Watch(tmp_path, 0.0).hung()
            assert stacks.stat().st_size
        collective = hang.collective_file(tmp_path, 0)
        collective.write_text("of the first question")
        with stacks.open("a") as file:
            file.write("what it did then")
        watch = hang.Watch(tmp_path, 0.0)
        assert watch.hung()
    assert "what it did then" not in watch.report
    assert "of the first question" not in watch.report


def test_ranks_that_have_ended_wait_for_those_of_other_machines(tmp_path: Path) -> None:
    with Heart(replace(ALONE, size=2, folder=str(tmp_path))) as heart:
        heart.beat()
    assert hang.Watch(tmp_path, 0.0, lambda moved: 0).hung() == ""
    assert hang.Watch(tmp_path, 0.0).hung(), "of one machine alone there is nobody to wait for"


def test_a_step_of_many_batches_is_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever looks sees each batch in the same phase, as loading it takes no time."""
    now = [0.0]
    monkeypatch.setattr(hang, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: None))
    with Heart(replace(ALONE, size=2, folder=str(tmp_path))) as heart:
        heart.step = 1
        watch = hang.Watch(tmp_path, 10.0)
        for now[0] in (0.0, 6.0, 12.0, 18.0):
            heart.enter("loading")
            heart.enter("step")
            heart._write()
            assert not watch.hung(), now
        for now[0], hangs in ((24.0, False), (29.0, True)):
            assert bool(watch.hung()) == hangs, now


def test_a_disk_that_is_full_is_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heart, watch = Heart(replace(ALONE, size=2, folder=str(tmp_path))), hang.Watch(tmp_path, 1000.0)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with heart:
        monkeypatch.setattr(Path, "write_text", full)
        heart.beat()
        while watch.beats()[0].beats == 0:
            assert not watch.hung()


def test_a_disk_that_takes_long_is_no_hang(tmp_path: Path) -> None:
    with Heart(replace(ALONE, size=2, folder=str(tmp_path))) as heart, heart.working():
        watch = hang.Watch(tmp_path, 1000.0)
        while not watch.beats() or watch.beats()[0].signs < 2:
            assert watch.hung() == ""


def test_who_has_waited_longer_for_a_disk_is_not_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are in their third step; one has read its part of a checkpoint faster, and the other stands still."""
    monkeypatch.setattr(hang, "_STACKS_SECONDS", 0.0)
    monkeypatch.setattr(hang, "_waits", lambda stack: "waits" in stack)
    for rank, signs in ((0, 2), (1, 9)):
        heart = Heart(replace(ALONE, rank=rank, size=2, folder=str(tmp_path)))
        heart._beats, heart._signs, heart.step, heart.phase = 3, signs, 2, "step"
        heart._write()
        hang.stacks_file(tmp_path, rank).write_text("")
    monkeypatch.setattr(hang.Watch, "_stacks", lambda self, beats: {0: "waits", 1: ""})
    assert hang.Watch(tmp_path, 0.0).hung().startswith("rank 1 makes no progress")
