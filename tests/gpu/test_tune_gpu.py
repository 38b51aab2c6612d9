"""Trials on a GPU."""

import json
import os
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import RESNET_JOB

from hotloop.core.job_file import parse_job
from hotloop.tune.job_trials import step_seconds


@pytest.mark.parametrize("compiled", [False, True])
def test_a_trial_that_is_forked_trains_on_the_gpu(make_images: Callable[..., Path], compiled: bool) -> None:
    images = make_images(classes=2, each=64)
    text = RESNET_JOB.format(images=images).replace('"cpu"', '"cuda"') + f"[speed]\ncompile = {json.dumps(compiled)}\n"
    job = parse_job(tomllib.loads(text), "job")
    assert 0 < step_seconds(job, os.environ) < 1
