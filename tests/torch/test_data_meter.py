"""What share of the speed with ready data a training reaches, and what is held to be guilty."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hotloop import train_job
from hotloop.core.job import Job, parse_job
from hotloop.core.machine import read_machine
from hotloop.data import image_list, images
from hotloop.data.stages import Stages
from hotloop.train.data_meter import DataMeter
from hotloop.train.observer import Observer
from hotloop.train.progress import Span


def job(**keys: Any) -> Job:
    return parse_job(
        {"data": {"train": "x", "workers": 4}, "model": {"name": "resnet18"}, "device": "cpu", **keys}, "job"
    )


def metered(step_seconds: float, span_seconds: float, stages: Stages) -> DataMeter:
    """Of 100 steps of 10 samples."""
    meter = DataMeter(torch.device("cpu"))
    meter.timer._seconds = step_seconds
    meter.timer.end(10)
    meter.add(Span(), 32, Stages())
    meter.add(Span(samples=1000, seconds=span_seconds), 100, stages)
    return meter


@pytest.mark.parametrize(
    ("stages", "slow", "words"),
    [
        (Stages(late=4, reading=1, working=16), "decoding", "4 workers cannot decode as fast (they read for 6 %"),
        (Stages(late=4, reading=15, working=16), "reading", "94 % of their time: a faster disk"),
        (Stages(late=0.1, working=5, decoding=9.5), "engines", "smaller images"),
        (Stages(late=0.1, working=5, copying=9.5), "copying", "smaller samples"),
        (Stages(late=0.1, working=5, copying=1, decoding=2), "host", "RandAugment"),
    ],
)
def test_the_guilty_stage_is_named(stages: Stages, slow: str, words: str) -> None:
    speed = metered(0.06, 10.0, stages).speed(job())
    assert speed.share == pytest.approx(0.6)
    assert speed.slow == slow
    assert words in speed.advice


def test_a_training_that_is_fed_well_blames_nobody() -> None:
    speed = metered(0.098, 10.0, Stages(late=0.1, working=9)).speed(job())
    assert (speed.share, speed.slow, speed.advice) == (pytest.approx(0.98), "", "")


def test_what_comes_before_it_has_settled_does_not_count() -> None:
    meter = DataMeter(torch.device("cpu"))
    meter.add(Span(samples=10, seconds=1000.0), 20, Stages(late=900))
    assert meter.speed(job()).share == 0
    meter = metered(0.1, 10.0, Stages())
    assert meter.speed(job()).share == 1


@pytest.mark.parametrize("guilty", ["reading", "decoding"])
def test_a_run_says_what_held_it_up(
    make_images: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, guilty: str
) -> None:
    """Workers of the training process itself, so that they can be slowed down."""
    module, name = (image_list, "read_file") if guilty == "reading" else (images, "decode_crop")
    quick = getattr(module, name)

    def slowly(*arguments: Any) -> Any:
        end = time.perf_counter() + 0.02
        while time.perf_counter() < end:
            pass
        return quick(*arguments)

    monkeypatch.setattr(module, name, slowly)
    raw: dict[str, Any] = {
        "task": {"image_size": 16}, "data": {"train": str(make_images()), "batch_size": 4, "workers": 0},
        "model": {"name": "tiny:cnn"}, "train": {"epochs": 25}, "device": "cpu",
        "log": {"every": 8, "tensorboard": False}, "run": {"dir": str(tmp_path / "run")},
    }  # fmt: skip
    result = train_job(parse_job(raw, "job"), read_machine(), Observer())[1]
    assert result.steps == 100
    assert 0 < result.data_speed_share < 0.5
    assert result.data_slow == guilty
    assert result.decode == "cpu"
