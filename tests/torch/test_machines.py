"""What machines that train together tell each other."""

import os
import signal
import subprocess
import sys
import time

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


def test_a_first_machine_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that has lost its power: nothing tells that it is gone."""
    monkeypatch.setattr(machines, "_ANSWER_SECONDS", 0.5)
    port = free_port()
    command = [sys.executable, "-c", FIRST, str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdout
        assert first.stdout.readline() == b"open\n"
        with Machines(Nodes(2, 1, "localhost", port), 60) as second:
            until = time.monotonic() + 60
            while not second.is_ahead(-1):  # it has begun its start 0
                assert time.monotonic() < until
            assert second.over() is None
            assert (second.progress(True), second.progress(False)) == (1, 1)
            os.kill(first.pid, signal.SIGSTOP)
            os.waitpid(first.pid, os.WUNTRACED)  # else it may answer once more
            second.progress(False)
            end = second.over()
            os.kill(first.pid, signal.SIGKILL)
    assert end
    assert (end.code, end.told) == (1, False)
    assert "not there any more" in end.text
