"""Whether a decoder of the device can be trusted: its pixels, under load, and how fast it is."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hotloop.core.errors import DamagedSample
from hotloop.data.dataset import Dataset
from hotloop.data.decode import ENCODED, decode_whole
from hotloop.data.images import BOXES, PIXELS
from hotloop.data.random import sample_generator
from hotloop.train.decoding import DeviceDecoder, pixel_room

_SAMPLES, _ROUNDS = 64, 8
_LARGEST_DIFFERENCE = 2.0
"""Levels of 255, mean over an image: decoders round, and interpolate colours, in their own ways. A wrong image is 30 or
more away."""
_LOAD_SIDE = 4096
"""Of the matrices that keep the device busy meanwhile."""

Encoded = tuple[np.ndarray, np.ndarray]
"""A file's content, uint8 (bytes,), and its row of boxes."""


@dataclass(frozen=True)
class Checked:
    """What was found.

    Attributes:
        fault: empty if the decoder can be trusted.
        images_per_second: decoded beside other work of the device.
        difference: levels, mean over the image that differs most from the CPU's.
    """

    fault: str = ""
    images_per_second: float = 0.0
    difference: float = 0.0


def encoded_samples(dataset: Dataset, seed: int) -> list[Encoded]:
    """Those of a data set's first samples that a decoder of the device takes."""
    found = []
    for index in range(min(_SAMPLES, len(dataset))):
        try:
            sample = dataset.encoded(index, sample_generator(seed, 0, index))
        except DamagedSample:  # it is told when its turn comes
            continue
        if BOXES in sample and sample[BOXES][ENCODED]:
            found.append((np.array(sample[PIXELS]), sample[BOXES]))
    return found


def check_decoder(decoder: DeviceDecoder, samples: Sequence[Encoded], device: torch.device) -> Checked:
    """Decode the same images some times while the device is busy, and compare them with the CPU's. About 0.3 s.

    As in a training the rooms are written by one stream and read by another.
    """
    rows = torch.zeros(len(samples), max(3 * _pixels(box) for _, box in samples), dtype=torch.uint8, device=device)
    load = torch.ones(_LOAD_SIDE, _LOAD_SIDE, device=device, dtype=torch.bfloat16)
    rounds, seconds = [], []
    for number in range(_ROUNDS):
        rows.fill_(number)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        torch.mm(load, load)
        started = time.perf_counter()
        done = decoder.decode([content for content, _ in samples], _rooms(rows, samples))
        seconds.append(time.perf_counter() - started)
        if not all(done):
            return Checked(f"{done.count(False)} of {len(done)} images are not decoded")
        rounds.append([room.clone() for room in _rooms(rows, samples)])
    if any(not torch.equal(one, again) for later in rounds[1:] for one, again in zip(rounds[0], later, strict=True)):
        return Checked("the same images have other pixels each time")
    away = max(_difference(found, content) for found, (content, _) in zip(rounds[0], samples, strict=True))
    wrong = f"an image is {away:.1f} levels of 255 away from what the CPU makes of it"
    return Checked(wrong if away > _LARGEST_DIFFERENCE else "", len(samples) / sorted(seconds)[_ROUNDS // 2], away)


def _rooms(rows: Tensor, samples: Sequence[Encoded]) -> list[Tensor]:
    return [pixel_room(row, box) for row, (_, box) in zip(rows, samples, strict=True)]


def _difference(found: Tensor, content: np.ndarray) -> float:
    expected = decode_whole(content.tobytes(), "a sample", found.numel())
    return float((found.cpu().float() - torch.from_numpy(np.array(expected)).float()).abs().mean())


def _pixels(box: np.ndarray) -> int:
    return int(box[0]) * int(box[1])
