"""Several machines that train one model: here, agents that know of each other only where they meet."""

import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from command import Command
from ports import free_port
from runs import rank_of, read_until, started, weights_of, write_small_job

from hotloop.train.interface import interface_towards

NOISY = ["--set", "model.name=tiny:cnn", "--set", "model.arguments.dropout=0.2", "--set", "checkpoint.every=2 steps"]
NOISY += ["--set", "data.last_batch=drop", "--set", "ranks.processes=1", "--set", "train.epochs=30"]


@pytest.fixture
def job(make_images: Callable[..., Path], tmp_path: Path) -> Path:
    return write_small_job(make_images, tmp_path)


@contextmanager
def machines(folder: Path, run: str, name: str, *options: str) -> Iterator[list["subprocess.Popen[str]"]]:
    """Two of them, started."""
    where = ["--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", name]
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                started(folder, *where, "--node-rank", str(number), "--set", f"run.dir={run}", *options)
            )
            for number in range(2)
        ]


@pytest.mark.slow
def test_machines_train_as_ranks_of_one_do_whatever_ends_them(
    hotloop: Command, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that is lost has all start again; a signal to one machine has all save."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # sums of as many parts everywhere
    one_machine = [*NOISY[:-4], "--set", "ranks.processes=2", "--set", "train.epochs=30"]
    hotloop("train", "job.toml", "--set", "run.dir=undisturbed", *one_machine, expect=0)
    with machines(job.parent, "disturbed", "a", *NOISY) as (first, second):
        read_until(first, "saved")
        os.kill(rank_of(second.pid, 1), signal.SIGKILL)
        read_until(second, "hotloop: rank 1 was ended by SIGKILL; starting all again")
        read_until(first, "hotloop: rank 0 ended with 1; starting all again from the last checkpoint (1 of 3)")
        read_until(first, "step")
        second.send_signal(signal.SIGTERM)
        (out, err), (_, other) = first.communicate(timeout=90), second.communicate(timeout=90)
    assert (first.returncode, second.returncode) == (75, 75), err + other
    assert "saved, as SIGTERM asked" in out
    with machines(job.parent, "disturbed", "b", *NOISY) as (first, second):
        (out, err), (_, other) = first.communicate(timeout=120), second.communicate(timeout=120)
    assert (first.returncode, second.returncode) == (0, 0), err + other
    assert "finished after 150 steps" in out
    left, expected = weights_of(job.parent / "disturbed"), weights_of(job.parent / "undisturbed")
    assert all(torch.equal(left[name], expected[name]) for name in expected)


def test_a_machine_that_is_left_alone_says_so(hotloop: Command, job: Path) -> None:
    where = ["--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    short = ["--set", "ranks.timeout=2 s", "--set", "ranks.processes=1"]
    done = hotloop("train", "job.toml", *where, *short, expect=1)
    assert "2 machines have not met at 127.0.0.1:" in done.err
    assert "within 2.0 s" in done.err
    assert "hotloop: GLOO_SOCKET_IFNAME=lo: it reaches 127.0.0.1" in done.err


def alone(folder: Path, rank: int, port: int, *options: str) -> AbstractContextManager["subprocess.Popen[str]"]:
    """One of two machines, which would wait for the other for five minutes."""
    where = ["--nnodes", "2", "--node-rank", str(rank), "--rdzv-endpoint", f"127.0.0.1:{port}"]
    return started(folder, *where, "--set", "ranks.timeout=300 s", "--set", "run.dir=run", *NOISY, *options)


@pytest.mark.slow
@pytest.mark.parametrize("losses", [0, 1])
def test_a_machine_that_is_lost_is_replaced(job: Path, losses: int) -> None:
    """With all that ran on it: the same words elsewhere go on from the last checkpoint, as often as the others have
    been started again before.
    """
    words = ["--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--set", "run.dir=run", *NOISY]
    words += ["--set", "ranks.restarts=1"]
    with started(job.parent, *words, "--node-rank", "0") as first:
        with started(job.parent, *words, "--node-rank", "1") as second:
            for _ in range(losses):
                read_until(first, "saved")
                os.kill(rank_of(second.pid, 1), signal.SIGKILL)
                read_until(first, "hotloop: rank 0 ended with 1; starting all again from the last checkpoint (1 of 1)")
            read_until(first, "saved")
            rank = rank_of(second.pid, 1)
            second.kill()
            os.kill(rank, signal.SIGKILL)
            second.wait(30)
        read_until(first, "hotloop: rank 0 ended with 1; starting all again from the last checkpoint")
        with started(job.parent, *words, "--node-rank", "1") as replacement:
            (out, err), (_, other) = first.communicate(timeout=150), replacement.communicate(timeout=150)
    assert (first.returncode, replacement.returncode) == (0, 0), err + other
    assert "finished after 150 steps" in out


@pytest.mark.slow
def test_a_hang_is_told_with_the_stacks_of_all_machines(job: Path) -> None:
    job.write_text(job.read_text().replace("[task]\nimage_size = 16\n", "[task]\nname = 'tiny:Stuck'\n"))
    words = ["--set", "model.name=line", "--set", "checkpoint.every=9 epochs", "--set", "ranks.timeout=15 s"]
    with machines(job.parent, "run", "hang", *NOISY, *words) as (first, second):
        (_, err), (_, other) = first.communicate(timeout=200), second.communicate(timeout=200)
    assert (first.returncode, second.returncode) == (1, 1), err + other
    assert "hotloop: rank 1 makes no progress for 15.0 s" in err
    assert "rank 1 makes no progress for 15.0 s" in other
    assert "in stuck" in other
    waiting = next(line for line in other.splitlines() if "--- rank 0" in line)
    assert "last collective: gloo:" in waiting


@pytest.mark.slow
def test_a_machine_that_ends_for_good_is_not_waited_for(job: Path) -> None:
    port = free_port()
    wrong = ["--set", "optimizer.name=none_such"]
    with alone(job.parent, 0, port) as first, alone(job.parent, 1, port, *wrong) as second:
        (_, err), (_, other) = first.communicate(timeout=90), second.communicate(timeout=90)
    assert (first.returncode, second.returncode) == (2, 2), err + other
    assert "none_such" in other
    assert "hotloop: machine 1 ended with 2" in err


@pytest.mark.parametrize("rank", [0, 1])
def test_a_machine_that_waits_for_others_hears_a_signal(job: Path, rank: int) -> None:
    with alone(job.parent, rank, free_port()) as machine:
        read_until(machine, "hotloop: GLOO_SOCKET_IFNAME=lo")
        machine.send_signal(signal.SIGTERM)
        _, err = machine.communicate(timeout=60)
    assert machine.returncode == 75, err
    assert f"hotloop: machine {rank} was asked to stop before anything was trained" in err


@pytest.mark.slow
def test_a_first_machine_that_is_killed_is_not_waited_for(job: Path) -> None:
    """Its ranks hear of it and save before they end; those of the others with them."""
    port = free_port()
    with alone(job.parent, 0, port) as first, alone(job.parent, 1, port) as second:
        read_until(first, "step")
        first.kill()
        _, err = second.communicate(timeout=90)
        first.communicate(timeout=60)
    assert second.returncode == 75, err
    assert "C++" not in err
    assert "frame #" not in err


def test_a_port_that_is_taken_is_said(job: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with alone(job.parent, 0, port) as machine:
            _, err = machine.communicate(timeout=60)
    assert machine.returncode == 1
    assert f"port {port} of this machine cannot be used" in err
    assert "another port in --rdzv-endpoint" in err


def test_the_interface_is_the_one_whose_address_is_used() -> None:
    assert interface_towards("127.0.0.1") == "lo"
    assert interface_towards("no.such.host.invalid") == ""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--nnodes", "2"], "--rdzv-endpoint '' is no host and port"),
        (["--nnodes", "2", "--rdzv-endpoint", "first"], "--rdzv-endpoint 'first' is no host and port"),
        (["--nnodes", "2", "--rdzv-endpoint", "first:99999"], "is no host and port"),
        (["--nnodes", "2", "--rdzv-endpoint", "a:1", "--node-rank", "2"], "--node-rank 2 is not less than --nnodes 2"),
        (["--nnodes", "8", "--rdzv-endpoint", "a:1"], "data.batch_size = 4 is less than the 8 processes"),
        (["--nnodes", "2", "--rdzv-endpoint", "a:1", "--set", "parallel=none"], 'parallel = "none" does not go with 2'),
        (["--nnodes", "0"], "0 is not in the range"),
    ],
)
def test_machines_that_make_no_sense_are_refused(hotloop: Command, job: Path, options: list[str], said: str) -> None:
    done = hotloop("train", "job.toml", *options, expect=2)
    assert said in done.err
    assert not (job.parent / "runs").exists()
