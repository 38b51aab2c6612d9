"""Ranks that torchrun has started, on two nodes: here, two of its agents on one machine."""

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from command import Command
from ports import free_port
from runs import TOKENS_JOB, weights_of


@contextmanager
def node(folder: Path, port: int, hosts: bool) -> Iterator["subprocess.Popen[bytes]"]:
    """One node's agent; one of them hosts what they meet at."""
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "test"]
    quick = f"is_host={hosts},last_call_timeout=20,keep_alive_interval=1,keep_alive_max_attempt=5"
    agent = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--local-addr", "localhost"]
    command = ["-m", "torch.distributed.run", *agent, *rendezvous, "--rdzv-conf", quick]
    training = ["-m", "hotloop", "train", "job.toml", "--set", "run.dir=run", "--set", "checkpoint.every=2 steps"]
    whole = [sys.executable, *command, *training]
    told = folder / f"hosts-{hosts}.txt"
    with told.open("w") as file, subprocess.Popen(whole, cwd=folder, stderr=file) as process:
        try:
            yield process
        finally:
            lose(process)


def lose(node: "subprocess.Popen[bytes]") -> None:
    """End the agent and its rank at once, as a node that loses its power does."""
    if node.poll() is None:
        ranks = Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split()
        for process in [node.pid, *map(int, ranks)]:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


@pytest.mark.slow
def test_what_is_left_goes_on_after_a_node_is_lost(hotloop: Command, tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.random.default_rng(0).integers(0, 64, 20 * 16 + 1).astype(np.uint16))
    (tmp_path / "job.toml").write_text(TOKENS_JOB.replace("epochs = 2", "epochs = 30"))
    hotloop("train", "job.toml", "--set", "run.dir=one", expect=0)
    port = free_port()
    with node(tmp_path, port, True) as first, node(tmp_path, port, False) as second:
        until = time.monotonic() + 200
        while not list(tmp_path.glob("run/checkpoints/epoch-*")):
            assert first.poll() is None
            assert time.monotonic() < until
            time.sleep(0.02)
        assert second.poll() is None
        lose(second)
        assert first.wait(timeout=200) == 0, (tmp_path / "hosts-True.txt").read_text()[-3000:]
    torch.testing.assert_close(weights_of(tmp_path / "run"), weights_of(tmp_path / "one"), rtol=1e-3, atol=1e-4)
    assert tomllib.loads((tmp_path / "run/job.toml").read_text())["ranks"]["processes"] == 1, "the one that was left"


@pytest.mark.slow
@pytest.mark.parametrize("resume", ["never", "from"])
def test_torchrun_goes_on_with_what_its_ranks_have_begun(tmp_path: Path, resume: str) -> None:
    """What was set aside, or named to begin with, is so for the first start alone."""
    np.save(tmp_path / "tokens.npy", np.random.default_rng(0).integers(0, 64, 20 * 16 + 1).astype(np.uint16))
    (tmp_path / "job.toml").write_text(TOKENS_JOB.replace("epochs = 2", "epochs = 40"))
    train = ["-m", "hotloop", "train", "job.toml", "--set", "checkpoint.every=2 steps"]
    first = [*train, "--set", f"run.dir={'run' if resume == 'never' else 'from'}", "--set", "train.epochs=1"]
    subprocess.run([sys.executable, *first], cwd=tmp_path, check=True, timeout=120, capture_output=True)
    agent = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2"]
    command = [sys.executable, *agent, *train, "--set", "run.dir=run", "--resume", resume]
    newest = 20 // 4  # steps of the first
    with (tmp_path / "told.txt").open("w") as file, subprocess.Popen(command, cwd=tmp_path, stderr=file) as process:
        try:
            until = time.monotonic() + 120
            while not list(tmp_path.glob("run/checkpoints/epoch-0002-*")):
                assert process.poll() is None, (tmp_path / "told.txt").read_text()[-3000:]
                assert time.monotonic() < until
                time.sleep(0.02)
            ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(ranks[-1]), signal.SIGKILL)
            assert process.wait(timeout=200) == 0, (tmp_path / "told.txt").read_text()[-3000:]
        finally:
            lose(process)
    told = (tmp_path / "told.txt").read_text()
    assert told.count("the earlier run is now") == (resume == "never")
    assert not list(tmp_path.glob("run/checkpoints/abandoned-*"))
    step = int(json.loads((tmp_path / "run/result.json").read_text())["resumed_from"][-8:])
    assert step > newest
