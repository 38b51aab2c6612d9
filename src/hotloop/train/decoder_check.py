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

SAMPLES = 64
"""That are decoded at once."""
_ROUNDS = 8
_MOST_REFUSED = 1 / 8
"""Of the images, as the engines may not take each kind of a JPEG."""
_LARGEST_DIFFERENCE = 2.0
"""Levels of 255, mean over an image: decoders round, and interpolate colours, in their own ways. A wrong image is 30 or
more away."""
_LOAD_SIDE, _LOAD_PRODUCTS = 4096, 64
"""Matrices whose products keep the device busy for longer than decoding takes: 64 images take an H200 6 ms."""


@dataclass(frozen=True)
class Encoded:
    """A file that a decoder of the device takes.

    Attributes:
        content: uint8 (bytes,).
        pixels: what the CPU makes of it, uint8 (height, width, 3).
        box: its row of boxes.
    """

    content: np.ndarray
    pixels: np.ndarray
    box: np.ndarray


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
    """Those of a data set's first samples that a decoder of the device takes; damaged ones are left for their turn."""
    found = []
    for index in range(min(SAMPLES, len(dataset))):
        try:
            sample = dataset.encoded(index, sample_generator(seed, 0, index))
            if BOXES in sample and sample[BOXES][ENCODED]:
                content, box = np.array(sample[PIXELS]), sample[BOXES]
                pixels = decode_whole(content.tobytes(), dataset.name(index), int(box[0] * box[1]))
                found.append(Encoded(content, np.array(pixels), box))
        except DamagedSample:
            continue
    return found


def check_decoder(decoder: DeviceDecoder, samples: Sequence[Encoded], device: torch.device) -> Checked:
    """Decode the same images some times while the device is busy, and compare them with the CPU's.

    As in a training the rooms are written by one stream and read by another.
    """
    rows = torch.zeros(len(samples), max(one.pixels.size for one in samples), dtype=torch.uint8, device=device)
    rooms = [pixel_room(row, one.box) for row, one in zip(rows, samples, strict=True)]
    rounds: list[list[Tensor]] = []
    taken: list[bool] = []
    seconds = []
    load = _Load(device)
    for number in range(_ROUNDS):
        rows.fill_(number)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        load.start()
        started = time.perf_counter()
        done = decoder.decode([one.content for one in samples], rooms)
        seconds.append(time.perf_counter() - started)
        if done.count(False) > _MOST_REFUSED * len(done):
            return Checked(f"{done.count(False)} of {len(done)} images are not decoded")
        if rounds and done != taken:
            return Checked("it does not decode the same images each time")
        taken = done
        rounds.append([room.clone() for room, there in zip(rooms, done, strict=True) if there])
    if any(not torch.equal(one, again) for later in rounds[1:] for one, again in zip(rounds[0], later, strict=True)):
        return Checked("the same images have other pixels each time")
    expected = [one.pixels for one, there in zip(samples, taken, strict=True) if there]
    away = max(_difference(found, pixels) for found, pixels in zip(rounds[0], expected, strict=True))
    wrong = f"an image is {away:.1f} levels of 255 away from what the CPU makes of it"
    return Checked(wrong if away > _LARGEST_DIFFERENCE else "", len(samples) / sorted(seconds)[_ROUNDS // 2], away)


class _Load:
    """Work for a GPU, on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if self._stream:
            self._factor = torch.ones(_LOAD_SIDE, _LOAD_SIDE, device=device, dtype=torch.bfloat16)
            self._product = torch.empty_like(self._factor)
            self._stream.wait_stream(torch.cuda.current_stream(device))
            for one in (self._factor, self._product):  # nobody else's until the last product is there
                one.record_stream(self._stream)

    def start(self) -> None:
        """Queue it."""
        if self._stream:
            with torch.cuda.stream(self._stream):
                for _ in range(_LOAD_PRODUCTS):
                    torch.mm(self._factor, self._factor, out=self._product)


def _difference(found: Tensor, expected: np.ndarray) -> float:
    return float((found.cpu().float() - torch.from_numpy(expected).float()).abs().mean())
