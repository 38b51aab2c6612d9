"""A process that forks for trials."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

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
