"""Trials on a GPU."""

import json
import os
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from hotloop.core.job_file import parse_job
from hotloop.tune.job_trials import step_seconds

JOB = """
name = "tuned"
device = "cuda"
[task]
image_size = 32
[data]
train = "{images}"
batch_size = 8
[model]
name = "resnet10t"
[speed]
compile = {compile}
"""


@pytest.mark.parametrize("compiled", [False, True])
def test_a_trial_that_is_forked_trains_on_the_gpu(make_images: Callable[..., Path], compiled: bool) -> None:
    images = make_images(classes=2, each=64)
    job = parse_job(tomllib.loads(JOB.format(images=images, compile=json.dumps(compiled))), "job")
    assert 0 < step_seconds(job, os.environ) < 1
