"""Trials on a GPU."""

import json
import os
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from command import Command
from runs import RESNET_JOB

from hotloop.core.job_file import load_job, parse_job
from hotloop.tune.job_trials import JobTrials, step_seconds


@pytest.mark.parametrize("compiled", [False, True])
def test_a_trial_that_is_forked_trains_on_the_gpu(make_images: Callable[..., Path], compiled: bool) -> None:
    images = make_images(classes=2, each=64)
    text = RESNET_JOB.format(images=images).replace('"cpu"', '"cuda"') + f"[speed]\ncompile = {json.dumps(compiled)}\n"
    job = parse_job(tomllib.loads(text), "job")
    assert 0 < step_seconds(job, os.environ) < 1


TELLING = """
from pathlib import Path
from torch import cuda, optim

def telling(parameters, lr, **rest):
    grows = cuda.memory._snapshot()["allocator_settings"]["expandable_segments"]
    Path("{told}").write_text(str(grows))
    return optim.SGD(parameters, lr)
"""


@pytest.mark.parametrize("grows", [True, False])
def test_trial_and_training_have_the_allocator_that_was_asked_for(
    make_images: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grows: bool, hotloop: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    told = tmp_path / "told"
    Path("telling.py").write_text(TELLING.format(told=told))
    text = RESNET_JOB.format(images=make_images(classes=2, each=64)).replace('"cpu"', '"cuda"')
    Path("job.toml").write_text(text)
    own = "optimizer.name=telling:telling"
    job = load_job(Path("job.toml"), [own])
    with JobTrials(job, os.environ) as trials, trials({"expandable_segments": grows}) as running:
        next(running.chunks(time.monotonic() + 60))
    assert told.read_text() == str(grows)
    told.unlink()
    Path("tuned.toml").write_text(f"[job]\n[process]\nexpandable_segments = {str(grows).lower()}\n")
    hotloop("train", "job.toml", "--settings", "tuned.toml", "--set", own, "--set", "train.epochs=1", expect=0)
    assert told.read_text() == str(grows)
