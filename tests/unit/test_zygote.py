"""A process that forks for trials."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hotloop.tune.running import Running
from hotloop.tune.zygote import Zygote


@pytest.fixture
def zygote() -> Iterator[Zygote]:
    found = Zygote("test_zygote", {**os.environ, "PYTHONPATH": str(Path(__file__).parent)})
    yield found
    found.close()


def tell(what: str) -> None:
    print(what, os.environ.get("ONE"), os.getsid(0) == os.getpid())


def fail() -> None:
    raise ValueError("no data")


def wait_for_ever() -> None:
    signal.pause()


def test_each_fork_has_its_environment_its_session_its_output_and_its_code(zygote: Zygote, tmp_path: Path) -> None:
    for number in range(3):
        child = zygote.fork("tell", (f"number {number}",), {"ONE": str(number)}, tmp_path / str(number))
        assert child.wait() == child.poll() == 0
        assert (tmp_path / str(number)).read_text() == f"number {number} {number} True\n"
    child = zygote.fork("fail", (), {}, tmp_path / "failed")
    assert child.wait() == 1
    assert "ValueError: no data" in (tmp_path / "failed").read_text()


def test_one_that_goes_on_is_waited_for_no_longer_than_asked_and_its_signal_is_its_code(
    zygote: Zygote, tmp_path: Path
) -> None:
    child = zygote.fork("wait_for_ever", (), {}, tmp_path / "out")
    assert child.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.01)
    os.kill(child.pid, signal.SIGTERM)
    assert child.wait() == -signal.SIGTERM


def ends(pid: int) -> bool:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 10)[0])
    finally:
        os.close(descriptor)


def test_what_was_forked_ends_with_its_zygote(zygote: Zygote, tmp_path: Path) -> None:
    child = zygote.fork("wait_for_ever", (), {}, tmp_path / "out")
    zygote.close()
    assert ends(child.pid)
    assert child.wait() == -signal.SIGKILL
    again = zygote.fork("tell", ("again",), {}, tmp_path / "again")
    assert again.wait() == 0, "a new one"


def test_one_that_was_killed_between_two_trials_is_started_anew(zygote: Zygote, tmp_path: Path) -> None:
    assert zygote.fork("tell", ("first",), {}, tmp_path / "first").wait() == 0
    assert zygote._process
    zygote._process.kill()
    zygote._process.wait()
    assert zygote.fork("tell", ("second",), {}, tmp_path / "second").wait() == 0


def test_a_start_that_fails_leaves_it_as_it_was(
    zygote: Zygote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "no such program")
        with pytest.raises(FileNotFoundError):
            zygote.fork("tell", ("none",), {}, tmp_path / "none")
    assert zygote.fork("tell", ("one",), {}, tmp_path / "one").wait() == 0


def test_a_fork_that_ends_while_it_is_to_be_killed_is_waited_for_all_the_same(
    zygote: Zygote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between being asked whether it goes on and the signal."""
    monkeypatch.setattr("hotloop.tune.running._END_SECONDS", 0.01)
    folder = tmp_path / "trial"
    folder.mkdir()
    child = zygote.fork("wait_for_ever", (), {}, folder / "out")

    class Ending:
        pid = child.pid

        def poll(self) -> int | None:
            if child._code is None:
                os.kill(child.pid, signal.SIGKILL)
                child.wait()
                return None
            return child.poll()

        def wait(self, timeout: float | None = None) -> int:
            return child.wait(timeout)

    with Running(Ending(), folder):
        pass
    assert not folder.exists()
    assert zygote.fork("tell", ("next",), {}, tmp_path / "next").wait() == 0


def test_what_was_forked_ends_with_us_however_we_end(tmp_path: Path) -> None:
    program = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from hotloop.tune.zygote import Zygote
child = Zygote("test_zygote", {{**os.environ, "PYTHONPATH": {str(Path(__file__).parent)!r}}}).fork(
    "wait_for_ever", (), {{}}, Path("out"))
print(child.pid, flush=True)
child.wait()
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=tmp_path) as ours:
        assert ours.stdout
        pid = int(ours.stdout.readline())
        ours.kill()
    assert ends(pid)


def test_modules_that_cannot_be_imported_are_said(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No module named 'no_such_module'"):
        Zygote("no_such_module", os.environ).fork("tell", ("",), {}, tmp_path / "out")
