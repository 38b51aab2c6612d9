"""A training that hangs, and that no other process looks after."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import Queue
from types import SimpleNamespace

import pytest
from command import Command
from ports import free_port
from runs import paced_job

from hotloop.core.errors import HotloopError
from hotloop.train import own_watch
from hotloop.train.heartbeat import Heart
from hotloop.train.own_watch import OwnWatch
from hotloop.train.world import ALONE

LIMIT, LOOKS = 10.0, 20
"""Seconds without progress, and looks, twice a second, that make it."""


def in_a_step(world_size: int = 1, ends: bool = True) -> tuple[Heart, OwnWatch]:
    """One that has been looked at once."""
    heart = Heart(replace(ALONE, rank=world_size - 1, size=world_size))
    heart.enter("step")
    heart.step = 5
    watch = OwnWatch(heart, LIMIT, ends)
    assert not watch.look()
    return heart, watch


def looked(watch: OwnWatch, looks: int) -> list[HotloopError | str]:
    """What so many looks have to tell, and an empty one before it."""
    told = [watch.look() for _ in range(looks)]
    return [one for one in told if one]


@contextmanager
def a_thread_in(code: str, file: str) -> Iterator[None]:
    """A thread that is in the code of a file of that name, until this ends."""
    inside, end = threading.Event(), threading.Event()
    call = compile(code, file, "exec")
    thread = threading.Thread(target=exec, args=(call, {"inside": inside, "end": end}), name="reads-files")
    thread.start()
    inside.wait()
    try:
        yield
    finally:
        end.set()
        thread.join()


def test_what_makes_no_progress_is_told_with_its_threads_and_then_ended() -> None:
    _, watch = in_a_step()
    assert not looked(watch, LOOKS - 1)
    with a_thread_in("inside.set()\nend.wait()", "loader.py"):
        (told,) = looked(watch, 1)
        assert not looked(watch, 2 * LOOKS - 1)
        (end,) = looked(watch, 1)
    assert isinstance(told, str)
    assert told.startswith("the training makes no progress for 10.0 s: step after 5 steps; it is ended after 30.0 s;")
    assert '--- reads-files\n  File "' in told
    assert 'File "loader.py", line 2, in <module>' in told
    assert isinstance(end, HotloopError)
    assert end.what == "the training makes no progress for 30.0 s: step after 5 steps"
    assert "--- reads-files" in end.cause
    assert "ranks.timeout" in end.fix


def test_which_rank_it_is_is_told() -> None:
    _, watch = in_a_step(world_size=2)
    (told,) = looked(watch, LOOKS)
    assert str(told).startswith("rank 1 makes no progress")


@pytest.mark.parametrize(
    ("phase", "ends"), [("loading", True), ("saving", True), ("validating", True), ("step", False)]
)
def test_nothing_but_a_step_is_ended_and_that_only_where_a_process_is_ours(phase: str, ends: bool) -> None:
    """What waits for data or a disk can be stopped and saved; in a notebook nobody's process is ended."""
    heart, watch = in_a_step(ends=ends)
    heart.enter(phase)
    (told,) = looked(watch, 20 * LOOKS)
    assert isinstance(told, str)
    assert "it is ended" not in told


def test_steps_signs_and_phases_are_progress() -> None:
    heart, watch = in_a_step()

    def batch_is_there() -> None:
        heart.enter("loading")
        heart.enter("step")

    def step_is_done() -> None:
        heart.step += 1

    for progress in (heart.beat, batch_is_there, step_is_done, lambda: heart.enter("validating")):
        progress()
        assert not looked(watch, LOOKS)
    assert looked(watch, 1)


def test_a_step_may_take_as_long_as_one_before_it() -> None:
    heart, watch = in_a_step()
    assert len(looked(watch, 2 * LOOKS)) == 1
    heart.beat()
    assert not looked(watch, 1 + 2 * LOOKS)
    (told,) = looked(watch, 2 * LOOKS)
    assert isinstance(told, str)
    (end,) = looked(watch, 3 * LOOKS)
    assert isinstance(end, HotloopError)


def test_a_limit_shorter_than_a_look_is_one_look() -> None:
    heart = Heart(ALONE)
    watch = OwnWatch(heart, 0.1, ends=True)
    heart.enter("step")
    heart.step = 5
    assert not watch.look()
    assert isinstance(watch.look(), str)


@pytest.mark.parametrize("reader", ["has gone", "does not read"])
def test_where_nobody_reads_what_is_told_it_is_ended_all_the_same(reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    codes, end = Queue[int](), threading.Event()

    def write(text: str) -> None:
        if reader == "has gone":
            raise BrokenPipeError
        end.wait()

    heart = Heart(ALONE)
    heart.enter("step")
    heart.step = 5
    monkeypatch.setattr(own_watch, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(own_watch, "_TELL_SECONDS", 0.01)
    monkeypatch.setattr(own_watch, "os", SimpleNamespace(_exit=codes.put, path=os.path))
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=write, flush=lambda: None))
    with OwnWatch(heart, 0.03, ends=True):
        assert codes.get(timeout=60) == 1
    end.set()


def test_a_disk_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    heart, watch = in_a_step()
    with heart.working():
        assert not looked(watch, 20 * LOOKS)
    monkeypatch.setattr("hotloop.train.heartbeat.PATIENCE_SECONDS", 0.0)
    with heart.working():
        assert looked(watch, 2 * LOOKS)


def test_what_has_not_begun_to_train_does_not_hang_and_a_first_step_may_compile() -> None:
    heart = Heart(ALONE)
    watch = OwnWatch(heart, LIMIT, ends=True)
    assert not looked(watch, 20 * LOOKS)
    heart.enter("step")
    assert not looked(watch, 3 * LOOKS)
    (told,) = looked(watch, 1)
    assert "it is ended after 1 min 30 s" in str(told)


def test_who_looks_at_it_in_a_debugger_has_time() -> None:
    _, watch = in_a_step()
    with a_thread_in("inside.set()\nend.wait()", "/usr/lib/python3/bdb.py"):
        assert not looked(watch, 20 * LOOKS)


def write_stuck_job(folder: Path, task: str) -> None:
    text = paced_job(epochs=100).replace("tiny:Paced", f"tiny:{task}")
    (folder / "job.toml").write_text(text)


def test_one_process_that_hangs_is_ended(hotloop: Command, tmp_path: Path) -> None:
    write_stuck_job(tmp_path, "StuckAlone")
    done = hotloop("train", "job.toml", "--set", "ranks.timeout=3 s", expect=1)
    assert "warning: the training makes no progress for 3.0 s: step after 2 steps; it is ended after 9.0 s" in done.err
    assert "error: the training makes no progress for 9.0 s: step after 2 steps" in done.err
    assert "--- MainThread" in done.err
    assert ", in stuck" in done.err
    assert "fix:   mend what holds it up" in done.err


@pytest.mark.slow
def test_under_torchrun_each_rank_tells_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_stuck_job(tmp_path, "Stuck")
    agent = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    training = ["-m", "hotloop", "train", "job.toml", "--set", "ranks.timeout=10 s"]
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "support"))
    done = subprocess.run(
        [sys.executable, *agent, *training], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 1
    assert "warning: rank 1 makes no progress for 10.0 s" in done.stderr
    assert ", in stuck" in done.stderr
