"""`hotloop train` on several GPUs."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from command import Command
from runs import CLIPPED, EARLY, SMALL_JOB, TOKENS_JOB, losses, rank_of, read_until, started

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture
def job(make_images: Callable[..., Path], tmp_path: Path) -> Path:
    make_images(classes=3, each=7)
    file = tmp_path / "job.toml"
    file.write_text(SMALL_JOB.replace('device = "cpu"', 'device = "cuda"\nprecision = "fp32"'))
    return file


def test_all_gpus_train_what_one_would(hotloop: Command, job: Path) -> None:
    most = min(4, torch.cuda.device_count())
    hotloop("train", "job.toml", "--set", "run.dir=one", "--set", "parallel=none", expect=0, timeout=200)
    done = hotloop("train", "job.toml", "--set", "run.dir=all", "--set", f"ranks.processes={most}", "--json",
                   expect=0, timeout=200)  # fmt: skip
    assert json.loads(done.out)["status"] == "finished"
    assert losses(job.parent / "all") == pytest.approx(losses(job.parent / "one"), rel=1e-3)


@pytest.mark.parametrize("data", ["images", "arrays.npz"])
def test_batches_prepared_beside_messages_train_what_one_would(hotloop: Command, job: Path, data: str) -> None:
    """For as many steps as it takes until they are captured."""
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (20, 16, 16, 3), dtype=np.uint8)
    np.savez(job.parent / "arrays.npz", images=pixels, labels=random.integers(0, 3, 20))
    more = ["--set", f"data.train={data}", "--set", f"data.val={data}", "--set", "train.epochs=12"]
    more += ["--set", "data.last_batch=drop"]
    hotloop("train", "job.toml", "--set", "run.dir=one", "--set", "parallel=none", *more, expect=0, timeout=200)
    done = hotloop("train", "job.toml", "--set", "run.dir=two", "--set", "ranks.processes=2", *more,
                   expect=0, timeout=200)  # fmt: skip
    assert "not captured" not in done.err
    assert len(losses(job.parent / "two")) > 40  # some stand for two steps
    assert losses(job.parent / "two") == pytest.approx(losses(job.parent / "one"), rel=1e-3)


def test_a_rank_that_is_killed_is_started_again(job: Path) -> None:
    more = ["--set", "run.dir=killed", "--set", "ranks.processes=2", "--set", "train.epochs=200"]
    more += ["--set", "checkpoint.every=6 steps", "--set", "data.last_batch=drop"]
    with started(job.parent, *more) as child:
        read_until(child, "saved")
        os.kill(rank_of(child.pid, 1), signal.SIGKILL)
        out, err = child.communicate(timeout=200)
    assert child.returncode == 0, err
    assert "rank 1 was ended by SIGKILL; starting all again" in err
    assert "finished after 1000 steps" in out.replace(",", "")


@pytest.mark.parametrize(
    ("parallel", "more"),
    [
        ("ddp", []),
        ("ddp", ["--set", "ranks.static_graph=true"]),
        ("fsdp", []),
        ("fsdp", EARLY),
        ("tp", []),
        ("tp", CLIPPED),
        ("fsdp+tp", []),
        ("fsdp+tp", EARLY),
    ],
)
def test_models_in_parts_train_what_one_would(
    hotloop: Command, tmp_path: Path, parallel: str, more: list[str]
) -> None:  # fmt: skip
    np.save(tmp_path / "tokens.npy", np.random.default_rng(0).integers(0, 64, 20 * 16 + 1).astype(np.uint16))
    (tmp_path / "job.toml").write_text(TOKENS_JOB.replace('"cpu"', '"cuda"\nprecision = "fp32"'))
    hotloop("train", "job.toml", "--set", "run.dir=one", "--set", "parallel=none", *more, expect=0, timeout=200)
    ranks = 4 if "+" in parallel else 2
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    several = ["--set", f"parallel={parallel}", "--set", f"ranks.processes={ranks}", "--set", "run.dir=several"]
    several += ["--set", "checkpoint.background=true", *more]
    hotloop("train", "job.toml", *several, "--set", "train.epochs=1", expect=0, timeout=200)
    hotloop("train", "job.toml", *several, expect=0, timeout=200)
    assert losses(tmp_path / "several") == pytest.approx(losses(tmp_path / "one"), rel=1e-3)


def test_an_error_of_one_rank_ends_all_though_the_others_wait_for_it(hotloop: Command, job: Path) -> None:
    job.write_text(job.read_text().replace("[task]\nimage_size = 16\n", "[task]\nname = 'tiny:BrokenOnSecond'\n"))
    options = ["--set", "ranks.processes=2", "--set", "ranks.restarts=0", "--set", "model.name=line"]
    done = hotloop("train", "job.toml", *options, expect=1, timeout=100)  # NCCL's own limit is ten minutes
    assert "ValueError: a loss of the user's own" in done.err


SLOW_HASH = """
import hashlib, os, sys, time
class Slow:
    def __init__(self, data=b""):
        self.quick = quick(data)
    def update(self, data):
        if sys._getframe(1).f_code.co_name == "weights_sha256":
            time.sleep(0.5)
        self.quick.update(data)
    def __getattr__(self, name):
        return getattr(self.quick, name)
if os.environ.get("RANK") == "0":
    quick, hashlib.sha256 = hashlib.sha256, Slow
"""


def test_a_hash_longer_than_a_message_may_take_ends_no_training(tmp_path: Path) -> None:
    """Of 28 tensors it takes 28 s, where a rank is given up after 20 s: the others wait for one tensor at a time."""
    np.save(tmp_path / "tokens.npy", np.random.default_rng(0).integers(0, 64, 20 * 16 + 1).astype(np.uint16))
    (tmp_path / "job.toml").write_text(TOKENS_JOB.replace('"cpu"', '"cuda"\nprecision = "fp32"'))
    (tmp_path / "sitecustomize.py").write_text(SLOW_HASH)
    agent = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    training = ["-m", "hotloop", "train", "job.toml", "--set", "run.dir=run", "--set", "parallel=fsdp"]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        [sys.executable, *agent, *training, "--set", "ranks.timeout=20 s"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((tmp_path / "run/result.json").read_text())["weights_sha256"]
