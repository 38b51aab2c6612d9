"""What share of the speed with ready data a training reaches, and what is held to be guilty."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hotloop import train_job
from hotloop.core.job import Job
from hotloop.core.job_file import parse_job
from hotloop.core.machine import read_machine
from hotloop.data import image_list, images
from hotloop.data.stages import Stages
from hotloop.train import loop
from hotloop.train.data_meter import DataMeter
from hotloop.train.loop import Loop
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
        (Stages(late=4, reading=1, working=16), "decoding", "4 workers cannot decode as fast (reading is 6 %"),
        (Stages(late=4, reading=15, working=16), "reading", "94 % of the time: a faster disk"),
        (Stages(late=1, behind=3, working=5, copying=1, decoding=5), "engines", "more processors would help"),
        (Stages(late=1, behind=3, working=5, copying=9.5), "copying", "smaller samples"),
        (Stages(late=0.1, behind=0.2, working=39, copying=9, decoding=9), "host", "RandAugment"),  # busy
        (Stages(late=0.3, working=5), "host", "RandAugment"),  # 3 % waiting is no reason for 40 % lost
    ],
)
def test_the_guilty_stage_is_named(stages: Stages, slow: str, words: str) -> None:
    speed = metered(0.06, 10.0, stages).speed(job())
    assert speed.share == pytest.approx(0.6)
    assert speed.slow == slow
    assert words in speed.advice


def test_object_storage_is_not_made_faster_by_a_disk_but_by_what_is_kept_there() -> None:
    data = {"data": {"train": "s3://photos/train", "workers": 4}}
    advice = metered(0.06, 10.0, Stages(late=4, reading=15, working=16)).speed(job(**data)).advice
    assert "read from object storage for 94 % of the time: more of it kept on the local disk" in advice
    assert "data.cache_gib" in advice


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
        end = time.perf_counter() + 0.05
        while time.perf_counter() < end:
            pass
        return quick(*arguments)

    monkeypatch.setattr(module, name, slowly)
    raw: dict[str, Any] = {
        "task": {"image_size": 16}, "data": {"train": str(make_images()), "batch_size": 4, "workers": 0},
        "model": {"name": "tiny:cnn"}, "train": {"epochs": 12}, "device": "cpu",
        "log": {"every": 8, "tensorboard": False, "report": False}, "run": {"dir": str(tmp_path / "run")},
    }  # fmt: skip
    result = train_job(parse_job(raw, "job"), read_machine(), Observer())[1]
    assert result.steps == 48
    assert 0 < result.data_speed_share < 0.9  # how far below depends on what else the machine does
    assert result.data_slow == guilty
    assert result.decode == "cpu"


def test_a_validation_is_no_training(
    make_images: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = loop.validate

    def slowly(*arguments: Any, **options: Any) -> Any:
        end = time.perf_counter() + 0.5
        while time.perf_counter() < end:
            pass
        return slow(*arguments, **options)

    monkeypatch.setattr(loop, "validate", slowly)
    folder = str(make_images())
    raw: dict[str, Any] = {
        "task": {"image_size": 16}, "data": {"train": folder, "val": folder, "batch_size": 2, "workers": 0},
        "model": {"name": "tiny:cnn"}, "train": {"epochs": 8}, "device": "cpu",
        "log": {"tensorboard": False, "report": False},
        "checkpoint": {"every": "1 epoch"}, "run": {"dir": str(tmp_path / "run")},
    }  # fmt: skip
    started = time.perf_counter()
    result = train_job(parse_job(raw, "job"), read_machine(), Observer())[1]
    assert result.train_seconds < time.perf_counter() - started - 8 * 0.5


def test_before_it_has_settled_a_gpu_waits_for_what_the_workers_are_late_with() -> None:
    meter = DataMeter(torch.device("cpu"))
    meter._device = torch.device("cuda")
    meter.timer._seconds = 0.01
    meter.timer.end(10)
    compiling = meter.add(Span(samples=200, seconds=60.0, wait_seconds=50.0), 20, Stages(late=0.5, working=3))
    assert compiling.wait_seconds == 0.5
    meter.add(Span(samples=200, seconds=1.0), 20, Stages(late=0.5, working=3))
    settled = meter.add(Span(samples=1000, seconds=2.0, wait_seconds=1.5), 100, Stages(late=0.6, working=4))
    assert settled.wait_seconds == pytest.approx(1.0)


def tiny_job(folder: Path, run: Path, **data: Any) -> Job:
    raw: dict[str, Any] = {
        "task": {"image_size": 16}, "data": {"train": str(folder), "batch_size": 4, "workers": 0, **data},
        "model": {"name": "tiny:cnn"}, "train": {"epochs": 1}, "device": "cpu",
        "log": {"tensorboard": False, "report": False},
        "run": {"dir": str(run)},
    }  # fmt: skip
    return parse_job(raw, "job")


def test_a_decoder_that_cannot_be_had_is_not_claimed(make_images: Callable[..., Path], tmp_path: Path) -> None:
    told: list[str] = []

    class Told(Observer):
        def warn(self, text: str) -> None:
            told.append(text)

    result = train_job(tiny_job(make_images(), tmp_path / "run", decode="hardware"), read_machine(), Told())[1]
    assert result.decode == "cpu"
    assert any('"hardware" is not followed: the engines are a GPU' in text for text in told)


def test_a_run_that_fails_asks_the_device_nothing_more(
    make_images: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an error of a GPU each question raises it again: the result would be lost."""

    def broken(*arguments: Any) -> Any:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(DataMeter, "speed", broken)
    monkeypatch.setattr(Loop, "_train_step", broken)
    with pytest.raises(RuntimeError, match="the device is lost"):
        train_job(tiny_job(make_images(), tmp_path / "run"), read_machine(), Observer())
    assert '"status": "failed"' in (tmp_path / "run" / "result.json").read_text()
