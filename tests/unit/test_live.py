"""What processes that train say of themselves: written, read, and not believed blindly."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotloop.core import live
from hotloop.core.live import FOLDER, Publisher, live_folder, publish, read_live


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def publisher(folder: Path, clock: Clock | None = None, **who: object) -> Publisher:
    clock = clock or Clock()
    return Publisher(folder, clock, clock, **{"way": "train", "job": "digits", **who})


def test_what_is_published_is_read(tmp_path: Path) -> None:
    clock = Clock()
    ours = publisher(tmp_path / "live", clock, run="/runs/digits", rank=1, ranks=2, gpu="GPU-1", restarts=3)
    ours.stepped(0.5, 0.125, samples=64)
    ours.stepped(1.5, 0.125, samples=64, steps=2)
    ours.set(loss=0.25, phase="step")
    ours.note({"accuracy": 0.75})
    ours.saved(seconds=3.0, stalled=0.5)
    clock.now += 5
    ours.beat(step=40)
    (found,) = read_live(tmp_path / "live").processes
    assert (found.pid, found.job, found.run, found.rank, found.ranks, found.gpu, found.restarts) == (
        os.getpid(), "digits", "/runs/digits", 1, 2, "GPU-1", 3,
    )  # fmt: skip
    assert (found.step, found.steps, found.step_seconds, found.wait_seconds, found.samples) == (40, 3, 2.0, 0.25, 128)
    assert (found.loss, found.phase, found.metrics) == (0.25, "step", {"accuracy": 0.75})
    assert (found.saves, found.save_seconds, found.stalled_seconds, found.saved) == (1, 3.0, 0.5, 1000.0)
    assert (found.begun, found.heartbeat) == (1000.0, 1005.0)
    ours.close()
    assert read_live(tmp_path / "live").processes == ()
    assert list((tmp_path / "live").iterdir()) == []


def test_a_file_is_written_once_a_second_at_most(tmp_path: Path) -> None:
    clock = Clock()
    ours = publisher(tmp_path, clock)
    ours.beat(1)
    for step in range(2, 100):
        clock.now += 0.01
        ours.beat(step)
    assert read_live(tmp_path).processes[0].step == 1
    clock.now += 0.1
    ours.beat(100)
    assert read_live(tmp_path).processes[0].step == 100


def test_a_phase_is_told_at_once_and_is_a_sign_of_life(tmp_path: Path) -> None:
    clock = Clock()
    ours = publisher(tmp_path, clock)
    ours.beat(1)
    clock.now += 0.5
    ours.enter("validating")
    (found,) = read_live(tmp_path).processes
    assert (found.phase, found.heartbeat) == ("validating", 1000.5)


def test_phases_that_take_turns_in_each_step_are_told_once_a_second(tmp_path: Path) -> None:
    clock = Clock()
    ours = publisher(tmp_path, clock)

    def told() -> str:
        return read_live(tmp_path).processes[0].phase

    ours.enter("loading")
    assert told() == "loading", "the first batch: not starting any more"
    ours.enter("step")
    assert told() == "loading"
    clock.now += 2.5
    ours.enter("step")
    assert told() == "step", "a step that takes long"
    ours.enter("saving")
    assert told() == "saving"
    ours.beat(1, "saving")
    ours.enter("loading")
    assert told() == "loading", "training goes on, whatever comes of it"


def test_who_beats_after_each_step_is_asked_for_totals_once_a_second(tmp_path: Path) -> None:
    """And not the phases before, which would write what was known a step ago."""
    clock = Clock()
    ours = publisher(tmp_path, clock)
    ours.beat(0)
    asked = 0
    for step in range(1, 31):
        ours.enter("loading")
        clock.now += 0.15
        ours.enter("step")
        clock.now += 0.15
        if ours.due:
            asked += 1
            ours.stepped(0.3 * step - read_live(tmp_path).processes[0].step_seconds, 0.0)
        ours.beat(step)
        assert clock.now - 1000 - read_live(tmp_path).processes[0].step_seconds < 1.5
    assert asked >= 6


def test_a_disk_that_is_full_does_not_make_a_training_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    ours = publisher(tmp_path, clock)
    ours.beat(1)
    clock.now += 5

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    ours.beat(2)
    (found,) = read_live(tmp_path).processes
    assert (found.step, found.heartbeat) == (2, 1005.0)
    ours.close()
    assert list(tmp_path.iterdir()) == []


def test_metrics_with_long_and_odd_names_are_read(tmp_path: Path) -> None:
    ours = publisher(tmp_path)
    ours.note({("val", "accuracy"): 0.5, **{chr(0x4E00 + number) * 300: 1.0 for number in range(80)}})  # type: ignore[dict-item]
    ours.write()
    (found,) = read_live(tmp_path).processes
    assert len(found.metrics) == 64
    assert found.metrics["('val', 'accuracy')"] == 0.5


def test_a_folder_that_cannot_be_read_is_not_taken_for_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_live(tmp_path / "none").processes == ()

    def refuse(folder: Path) -> None:
        raise OSError(errno.EMFILE, "Too many open files", str(folder))

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        read_live(tmp_path)
    publisher(tmp_path).beat(1)  # who publishes goes on


def test_a_process_that_was_killed_is_left_out_and_its_file_goes_with_the_next(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from hotloop.core.live import Publisher\n"
        "Publisher(Path(sys.argv[1]), way='train', job='lost'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, timeout=60)
    assert len(list(tmp_path.iterdir())) == 1
    seen = read_live(tmp_path)
    assert seen.processes == ()
    assert seen.ignored["ended"] == 1
    publisher(tmp_path)
    assert [live.job for live in read_live(tmp_path).processes] == ["digits"]
    assert len(list(tmp_path.iterdir())) == 1


def test_a_part_that_a_killed_process_has_left_goes_with_the_next(tmp_path: Path) -> None:
    left, written, strange = (
        tmp_path / name for name in (f"12-34.{'a' * 16}.part", f"12-34.{'b' * 16}.part", "film.part")
    )
    for file in (left, written, strange):
        file.touch()
    for file in (left, strange):
        os.utime(file, (1000, 1000))
    publisher(tmp_path).close()
    assert set(tmp_path.iterdir()) == {written, strange}, "one that is new may be being written"


def test_another_process_under_the_same_number_is_another_one(tmp_path: Path) -> None:
    publisher(tmp_path).write()
    (file,) = tmp_path.iterdir()
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "started": content["started"] - 1}))
    assert read_live(tmp_path).ignored == {"foreign": 0, "damaged": 0, "ended": 1}


def test_a_process_in_another_container_lives_as_long_as_its_file_is_fresh(tmp_path: Path) -> None:
    publisher(tmp_path).write()
    (file,) = tmp_path.iterdir()
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "namespace": 1, "pid": 2**22 + 1}))
    written = file.stat().st_mtime
    assert len(read_live(tmp_path, now=lambda: written + 600).processes) == 1
    assert read_live(tmp_path, now=lambda: written + 7200).ignored["ended"] == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of others")
def test_files_of_another_user_than_the_process_are_ignored(tmp_path: Path) -> None:
    publisher(tmp_path).write()
    (file,) = tmp_path.iterdir()
    os.chown(file, 12345, 12345)
    assert read_live(tmp_path).ignored["foreign"] == 1


@pytest.mark.parametrize("kind", ["link", "folder"])
def test_nobody_is_written_over_through_the_name_of_a_part(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "token_hex", lambda size: "known")
    clock, victim = Clock(), tmp_path / "victim"
    victim.write_text("precious")
    ours = publisher(tmp_path / "live", clock)
    (file,) = (tmp_path / "live").iterdir()
    part = file.with_suffix(".known.part")
    part.symlink_to(victim) if kind == "link" else part.mkdir()
    clock.now += 5
    ours.beat(2)
    (found,) = read_live(tmp_path / "live").processes
    assert (found.step, victim.read_text()) == (2, "precious")


IMPOSSIBLE = {"steps": -10, "rank": -5, "wait_seconds": -1.0, "memory_bytes": 10**30, "phase": "dancing"}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_figures_are_damage(tmp_path: Path, name: str) -> None:
    publisher(tmp_path).write()
    (good,) = tmp_path.iterdir()
    good.write_text(json.dumps({**json.loads(good.read_text()), name: IMPOSSIBLE[name]}))
    seen = read_live(tmp_path)
    assert (seen.processes, seen.ignored["damaged"]) == ((), 1)


@pytest.mark.parametrize("kind", ["text", "link", "pipe", "folder", "large", "version", "deep", "infinite"])
def test_what_is_no_file_of_ours_is_counted_and_harms_nothing(tmp_path: Path, kind: str) -> None:
    publisher(tmp_path).write()
    (good,) = tmp_path.iterdir()
    content = json.loads(good.read_text())
    bad = tmp_path / "1-1.json"
    match kind:
        case "text":
            bad.write_text("{half")
        case "link":
            bad.symlink_to(good)
        case "pipe":
            os.mkfifo(bad)
        case "folder":
            bad.mkdir()
        case "large":
            bad.write_text(json.dumps({**content, "job": "x" * 200_000}))
        case "version":
            bad.write_text(json.dumps({**content, "format": 99}))
        case "deep":
            bad.write_text("[" * 60_000)
        case "infinite":
            bad.write_text(json.dumps({**content, "heartbeat": float("inf")}))
    seen = read_live(tmp_path)
    assert [live.job for live in seen.processes] == ["digits"]
    assert seen.ignored == {"foreign": 0, "damaged": 1, "ended": 0}


def test_hostile_words_come_out_harmless(tmp_path: Path) -> None:
    publisher(tmp_path, job="a\n\x1b[31m" + "b" * 1000, run="/runs/" + "c" * 1000).write()
    (found,) = read_live(tmp_path).processes
    assert found.run == "/runs/" + "c" * 1000, "whoever looks for a run looks for all of its path"
    assert found.job.startswith("a??[31mbbb")
    assert len(found.job) == 200


def test_a_loss_that_is_no_number_is_told_as_none(tmp_path: Path) -> None:
    ours = publisher(tmp_path)
    ours.set(loss=float("nan"))
    ours.write()
    assert read_live(tmp_path).processes[0].loss is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=500, deadline=None)
@given(changed=st.dictionaries(st.sampled_from(["pid", "job", "rank", "loss", "metrics", "heartbeat"]), json_values))
def test_no_content_makes_reading_fail(tmp_path_factory: pytest.TempPathFactory, changed: dict[str, object]) -> None:
    folder = tmp_path_factory.mktemp("live")
    publisher(folder).write()
    (file,) = folder.iterdir()
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))
    seen = read_live(folder)
    assert len(seen.processes) + sum(seen.ignored.values()) == 1


def test_a_child_does_not_take_its_parents_file_away(tmp_path: Path) -> None:
    ours = publisher(tmp_path)
    if (child := os.fork()) == 0:
        ours.set(job="child")
        ours.write()
        ours.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert [live.job for live in read_live(tmp_path).processes] == ["digits"]


def test_nothing_is_written_where_that_cannot_be(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    ours = publisher(file / "live")
    ours.beat(1)
    ours.close()
    assert file.read_bytes() == b""
    clock = Clock()
    other = publisher(tmp_path / "live", clock)
    shutil.rmtree(tmp_path / "live")
    clock.now += 60
    other.beat(1)
    other.close()
    assert not (tmp_path / "live").exists()


def test_another_users_folder_is_not_used(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can make folders of others")
    (tmp_path / "live").mkdir(mode=0o777)
    os.chown(tmp_path / "live", 12345, 12345)
    publisher(tmp_path / "live").write()
    assert list((tmp_path / "live").iterdir()) == []


def test_the_folder_is_asked_for_by_a_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    assert live_folder() == tmp_path
    monkeypatch.setenv(FOLDER, "off")
    assert live_folder() is None
    monkeypatch.setenv(FOLDER, "")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert live_folder() in (tmp_path / "hotloop", Path("/run/hotloop"))
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert live_folder() in (Path(f"/dev/shm/hotloop-{os.getuid()}"), Path("/run/hotloop"))


def test_a_script_of_ones_own_is_made_known_by_its_figures(tmp_path: Path) -> None:
    code = (
        "import hotloop, os, sys; from pathlib import Path; from hotloop.core.live import read_live\n"
        "hotloop.publish({'revenue': 3.5}, step=7)\n"
        "(found,) = read_live(Path(os.environ['HOTLOOP_LIVE'])).processes\n"
        "print(found.way, found.step, found.metrics, found.rank, found.ranks, found.run)"
    )
    environment = {**os.environ, FOLDER: str(tmp_path), "RANK": "3", "WORLD_SIZE": "8"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, cwd="/usr"
    )
    assert done.stdout == "library 7 {'revenue': 3.5} 3 8 /usr\n", done.stderr
    assert list(tmp_path.iterdir()) == []


def test_figures_join_what_is_published_already(tmp_path: Path) -> None:
    ours = publisher(tmp_path)
    publish({"revenue": 3.5})
    ours.write()
    (found,) = read_live(tmp_path).processes
    assert (found.way, found.metrics) == ("train", {"revenue": 3.5})
    with pytest.raises(ValueError, match="step is -5"):
        publish({"revenue": 4.0}, step=-5)  # nobody would read a file that says so
    ours.close()
