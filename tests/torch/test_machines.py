"""What machines that train together tell each other."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from ports import free_port

from hotloop.train import machines
from hotloop.train.machines import Machines, Nodes

FIRST = """
import sys
from hotloop.train.machines import Machines, Nodes
with Machines(Nodes(2, 0, "localhost", int(sys.argv[1])), 60) as first:
    first.begin(0)
    print("open", flush=True)
    sys.stdin.read()
"""


@contextmanager
def two_machines(id_of_second: str = "hotloop") -> "Iterator[tuple[subprocess.Popen[bytes], Machines]]":
    """The first one, a process; and the second."""
    port = free_port()
    command = [sys.executable, "-c", FIRST, str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        try:
            assert first.stdout
            assert first.stdout.readline() == b"open\n"
            with Machines(Nodes(2, 1, "localhost", port, id_of_second), 60) as second:
                until = time.monotonic() + 60
                while second.progress(False) is None:
                    assert time.monotonic() < until
                yield first, second
        finally:
            first.kill()


def suspend(process: "subprocess.Popen[bytes]") -> None:
    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)  # else it may answer once more


def test_a_first_machine_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that has lost its power: nothing tells that it is gone."""
    monkeypatch.setattr(machines, "_ANSWER_SECONDS", 0.5)
    with two_machines() as (first, second):
        assert second.is_ahead(-1), "it has begun its start 0"
        assert second.over() is None
        assert (second.progress(True), second.progress(False)) == (1, 1)
        suspend(first)
        second.progress(False)
        end = second.over()
    assert end
    assert (end.code, end.told) == (1, False)
    assert "not there any more" in end.text


def test_a_first_machine_that_was_silent_for_a_while_is_heard_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network that is away for a minute, as a switch starts again: ranks over TCP go on, and so must restarts."""
    monkeypatch.setattr(machines, "_ANSWER_SECONDS", 0.5)
    with two_machines() as (first, second):
        suspend(first)
        assert second.progress(True) is None
        assert second.over() is not None
        os.kill(first.pid, signal.SIGCONT)
        until = time.monotonic() + 60
        while second.over() is not None:
            assert time.monotonic() < until
        assert second.progress(False) == 1, "what was told meanwhile has arrived"


def test_machines_of_another_job_are_not_heard() -> None:
    with two_machines(id_of_second="another") as (_, second):
        assert not second.is_ahead(-1)
