"""A training that hangs, and that no other process looks after."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from command import Command
from ports import free_port
from runs import paced_job

from hotloop.train.heartbeat import Heart
from hotloop.train.own_watch import OwnWatch
from hotloop.train.world import ALONE

LIMIT = 10.0
WITHIN, PAST = 20, 21
"""Looks, twice a second."""


def in_a_step(world_size: int = 1) -> tuple[Heart, OwnWatch]:
    heart = Heart(replace(ALONE, rank=world_size - 1, size=world_size))
    heart.enter("step")
    heart.step = 5
    return heart, OwnWatch(heart, LIMIT)


def hangs(watch: OwnWatch, looks: int) -> bool:
    return any(watch.hung() for _ in range(looks))


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


def test_what_makes_no_progress_is_told_with_its_threads() -> None:
    _, watch = in_a_step()
    assert not hangs(watch, WITHIN)
    with a_thread_in("inside.set()\nend.wait()", "loader.py"):
        error = next(filter(None, [watch.hung() for _ in range(PAST)]))
    assert error.what == "the training makes no progress for 10.0 s: step after 5 steps"
    assert "--- reads-files" in error.cause
    assert 'File "loader.py", line 2' in error.cause
    assert "ranks.timeout" in error.fix
    _, watch = in_a_step(world_size=2)
    told = next(filter(None, [watch.hung() for _ in range(PAST)]))
    assert told.what.startswith("rank 1 makes no progress")


def test_steps_signs_and_phases_are_progress() -> None:
    heart, watch = in_a_step()
    for number in range(5):
        assert not hangs(watch, WITHIN)
        heart.beat()
        assert not hangs(watch, WITHIN)
        heart.step += 1
        assert not hangs(watch, WITHIN)
        heart.enter(f"phase {number}")
    assert hangs(watch, PAST + 1)


def test_a_disk_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    heart, watch = in_a_step()
    with heart.working():
        assert not hangs(watch, 10 * PAST)
    assert hangs(watch, PAST + 1)
    monkeypatch.setattr("hotloop.train.heartbeat.PATIENCE_SECONDS", 0.0)
    with heart.working():
        assert hangs(watch, PAST + 1)


def test_what_has_not_begun_to_train_does_not_hang_and_a_first_step_may_compile() -> None:
    heart = Heart(ALONE)
    watch = OwnWatch(heart, LIMIT)
    assert not hangs(watch, 10 * PAST)
    heart.enter("step")
    assert not hangs(watch, 3 * WITHIN)
    assert hangs(watch, 2)


def test_who_looks_at_it_in_a_debugger_has_time() -> None:
    _, watch = in_a_step()
    with a_thread_in("inside.set()\nend.wait()", "/usr/lib/python3/bdb.py"):
        assert not hangs(watch, 10 * PAST)
    assert hangs(watch, PAST)


def write_stuck_job(folder: Path, task: str) -> None:
    text = paced_job(epochs=100).replace("tiny:Paced", f"tiny:{task}")
    (folder / "job.toml").write_text(text)


def test_one_process_that_hangs_is_ended(hotloop: Command, tmp_path: Path) -> None:
    write_stuck_job(tmp_path, "StuckAlone")
    done = hotloop("train", "job.toml", "--set", "ranks.timeout=5 s", expect=1)
    assert "error: the training makes no progress for 5.0 s: step after 2 steps" in done.err
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
    assert "error: rank 1 makes no progress for 10.0 s" in done.stderr
    assert ", in stuck" in done.stderr
