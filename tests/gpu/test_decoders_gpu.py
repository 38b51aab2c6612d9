"""The card's JPEG engines: the CPU's pixels, under load and in a training, and nothing lost where they fail."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pictures import write_image

from hotloop import train_job
from hotloop.core.job import Job
from hotloop.core.job_file import parse_job
from hotloop.core.machine import read_machine
from hotloop.data.decode import decode_whole
from hotloop.data.image_list import find_images
from hotloop.data.images import ImageFiles, RandomCrop
from hotloop.train.dali_decoder import DaliDecoder, dali_is_installed
from hotloop.train.decoder_check import SAMPLES, check_decoder, encoded_samples
from hotloop.train.decoding import DeviceDecoder
from hotloop.train.hardware_decoder import HardwareDecoder, nvjpeg_library
from hotloop.train.observer import Event, Observer, Started, Warned

pytestmark = pytest.mark.skipif(nvjpeg_library() is None, reason="no nvJPEG: pip install 'hotloop[gpu-decode]'")

GPU = torch.device("cuda")


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    for number in range(96):
        options = {"quality": 90, "subsampling": ("4:2:0", "4:4:4", "4:2:2")[number % 3]}
        write_image(
            tmp_path / "photos" / str(number % 2) / f"{number:02}.jpg", number, (61 + number % 7, 48), **options
        )
    return tmp_path / "photos"


def decoder() -> HardwareDecoder:
    library = nvjpeg_library()
    assert library
    return HardwareDecoder(GPU, library)


NEEDS_DALI = pytest.mark.skipif(not dali_is_installed(), reason="no DALI: pip install 'hotloop[dali]'")


@pytest.mark.parametrize("new", [decoder, pytest.param(lambda: DaliDecoder(GPU, SAMPLES), marks=NEEDS_DALI)])
def test_decoders_make_the_pixels_of_the_cpu_while_the_card_is_busy(
    photographs: Path, new: Callable[[], DeviceDecoder]
) -> None:
    files = ImageFiles(find_images(str(photographs)), 32, RandomCrop((0.3, 1), (0.7, 1.4), 0.5), 10**8, resize=False)
    samples = encoded_samples(files, 0)
    assert len(samples) == SAMPLES
    tried = new()
    checked = check_decoder(tried, samples, GPU)
    tried.close()
    assert not checked.fault
    assert checked.difference < 0.5


def test_what_they_refuse_is_told(photographs: Path) -> None:
    good = (photographs / "0" / "00.jpg").read_bytes()
    rooms = [torch.zeros(48, 61, 3, dtype=torch.uint8, device="cuda") for _ in range(4)]
    engines = decoder()
    contents = [np.frombuffer(each, np.uint8) for each in (good, good[:40], b"\xff\xd8 nothing", good)]
    done = engines.decode(contents, rooms)
    engines.close()
    assert done == [True, False, False, True]
    expected = torch.from_numpy(np.array(decode_whole(good, "", 10**8)))
    for room in (rooms[0], rooms[3]):
        assert (room.cpu().int() - expected.int()).abs().max() <= 2


class Told(Observer):
    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.choices: dict[str, object] = {}

    def on(self, event: Event) -> None:
        if isinstance(event, Warned):
            self.warnings.append(event.text)
        if isinstance(event, Started):
            self.choices = {choice.key: choice.value for choice in event.choices}


def job(folder: Path, run_dir: Path, **data: Any) -> Job:
    raw = {
        "task": {"image_size": 32}, "model": {"name": "tiny:cnn"}, "train": {"epochs": 12}, "precision": "fp32",
        "data": {"train": str(folder), "batch_size": 16, "workers": 2, **data},
        "log": {"every": 6, "tensorboard": False, "report": False}, "run": {"dir": str(run_dir)},
    }  # fmt: skip
    return parse_job(raw, "job")


@pytest.mark.parametrize(("asked", "used"), [("auto", "hardware"), pytest.param("dali", "dali", marks=NEEDS_DALI)])
def test_a_training_with_a_decoder_is_the_one_without(photographs: Path, tmp_path: Path, asked: str, used: str) -> None:
    ends = []
    for decode in ("cpu", asked):
        told = Told()
        result = train_job(job(photographs, tmp_path / decode, decode=decode), read_machine(), told)[1]
        assert result.captured, result.not_captured
        ends.append(result)
    assert told.choices.get("data.decode", asked) == used
    assert ends[1].decode == used
    assert ends[1].metrics["train_loss"] == pytest.approx(ends[0].metrics["train_loss"], rel=2e-2)


def test_damaged_files_are_named_and_the_run_goes_on(photographs: Path, tmp_path: Path) -> None:
    (photographs / "0" / "10.jpg").write_bytes((photographs / "0" / "10.jpg").read_bytes()[:-60])
    (photographs / "1" / "11.jpg").write_bytes(b"no image")
    result = train_job(job(photographs, tmp_path / "run", decode="hardware"), read_machine(), Told())[1]
    assert [Path(damaged["path"]).name for damaged in result.corrupt_files] == ["10.jpg", "11.jpg"]
    assert result.steps == 12 * 6
