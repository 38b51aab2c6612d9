"""Images that are left encoded and finished on the device: the same as from workers, whatever happens to one."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from pictures import write_image
from torch import Tensor

from hotloop.core.errors import DamagedSample
from hotloop.data.decode import ENCODED, decode_whole
from hotloop.data.image_list import find_images
from hotloop.data.images import BOXES, PIXELS, ImageFiles, RandomCrop
from hotloop.data.loader import Batch, Loaders, LoaderSettings
from hotloop.kernels.resample import resample_plain
from hotloop.train.dali_decoder import DaliDecoder, dali_is_installed
from hotloop.train.decoder_check import SAMPLES, check_decoder, encoded_samples
from hotloop.train.decoding import Decoded, Decoding, encoded_places, other_rows
from hotloop.train.device_slots import DeviceSlot

SIZE = 16
CPU = torch.device("cpu")


class PlainDecoder:
    """As the engines of a card: it takes any file for sound, but for those that it is told to refuse."""

    def __init__(self, refused: Callable[[np.ndarray], bool] = lambda content: False, error: int = 0) -> None:
        self.refused, self.error, self.calls = refused, error, 0

    def decode(self, encoded: Sequence[np.ndarray], rooms: Sequence[Tensor]) -> list[bool]:
        self.calls += 1
        for content, room in zip(encoded, rooms, strict=True):
            if not self.refused(content):
                room.copy_(torch.from_numpy(decode_whole(content.tobytes(), "a file", 10**8) ^ self.error))
        return [not self.refused(content) for content in encoded]

    def close(self) -> None:
        self.calls = -1


@pytest.fixture
def files(tmp_path: Path) -> ImageFiles:
    for number in range(24):
        kind = "png" if number % 8 == 3 else "jpg"
        write_image(tmp_path / str(number % 2) / f"{number:02}.{kind}", number, (30 + number % 3, 20), quality=100)
    return ImageFiles(find_images(str(tmp_path)), SIZE, RandomCrop((0.3, 1), (0.7, 1.4), 0.5), 10**8, resize=False)


@contextmanager
def batches(files: ImageFiles, encoded: int, workers: int = 0, **options: Any) -> Iterator[list[Batch]]:
    with Loaders([(files, LoaderSettings(8, seed=3, **options))], workers) as (loader,):
        loader.encoded = encoded
        yield [copied(batch) for batch in loader.batches(epoch=2)]


def copied(batch: Batch) -> Batch:
    return replace(batch, arrays={name: array.copy() for name, array in batch.arrays.items()})


@contextmanager
def decoding(files: ImageFiles, decoder: PlainDecoder, **options: Any) -> Iterator[Decoding]:
    found = Decoding(lambda: decoder, files, LoaderSettings(8, seed=3, **options), None)
    try:
        yield found
    finally:
        found.close()


def finished(decoding: Decoding, batch: Batch) -> tuple[dict[str, Tensor], Decoded]:
    """A batch as it would be on a device: what is encoded has not been sent."""
    sent = {name: torch.from_numpy(array.copy()) for name, array in batch.arrays.items()}
    for place in encoded_places(batch.arrays):
        sent[PIXELS][place] = 77
    slot = cast(DeviceSlot, SimpleNamespace(wait_unused=lambda: None, wait_sent=lambda: None))
    return sent, decoding.start(batch, sent, slot).result()


def assert_alike(sent: dict[str, Tensor], decoded: Decoded, worker: Batch) -> None:
    """The same images, labels and samples as a worker's batch."""
    wanted = {name: torch.from_numpy(array) for name, array in worker.arrays.items()}
    assert torch.allclose(images(sent), images(wanted), atol=1e-3)
    assert torch.equal(sent["labels"], wanted["labels"])
    assert tuple(decoded.indices) == worker.indices


def images(tensors: dict[str, Tensor]) -> Tensor:
    return resample_plain(tensors[PIXELS], tensors[BOXES], torch.zeros(3), torch.ones(3), SIZE, torch.float64)


@pytest.mark.parametrize("workers", [0, 2])
def test_they_are_the_images_that_workers_would_have_decoded(files: ImageFiles, workers: int) -> None:
    with (
        batches(files, 0) as plain,
        batches(files, 5, workers) as left,
        decoding(files, PlainDecoder()) as decoder,
    ):
        for one, other in zip(plain, left, strict=True):
            places = encoded_places(other.arrays)
            assert set(places) <= set(range(5))
            assert not encoded_places(one.arrays)
            sent, decoded = finished(decoder, other)
            assert_alike(sent, decoded, one)
        assert sum(len(encoded_places(batch.arrays)) for batch in left) > 8


def test_one_that_is_refused_is_read_as_a_worker_reads_it(files: ImageFiles) -> None:
    with (
        batches(files, 0) as plain,
        batches(files, 8) as left,
        decoding(files, PlainDecoder(lambda _: True)) as decoder,
    ):
        for one, other in zip(plain, left, strict=True):
            sent, decoded = finished(decoder, other)
            assert_alike(sent, decoded, one)
            assert not decoded.damages


def test_a_damaged_one_is_replaced_by_the_same_one_as_by_a_worker(files: ImageFiles) -> None:
    broken = Path(files.images.path(5))
    refused = len(damaged_in_the_middle(broken))
    with (
        batches(files, 0) as plain, batches(files, 8) as left,
        decoding(files, PlainDecoder(lambda given: len(given) == refused)) as decoder,
    ):  # fmt: skip
        damages: dict[str, str] = {}
        for one, other in zip(plain, left, strict=True):
            sent, decoded = finished(decoder, other)
            assert_alike(sent, decoded, one)
            damages |= decoded.damages
        assert list(damages) == [str(broken)]


def test_a_damaged_one_stops_a_run_that_wants_that(files: ImageFiles) -> None:
    refused = {"on_damaged": "raise"}
    with batches(files, 8) as left, decoding(files, PlainDecoder(lambda _: True), **refused) as decoder:
        for number in encoded_places(left[0].arrays):
            Path(files.images.path(left[0].indices[number])).write_bytes(b"gone")
        with pytest.raises(DamagedSample, match="format"):
            finished(decoder, left[0])


def test_what_has_no_room_is_left_to_workers(files: ImageFiles, tmp_path: Path) -> None:
    write_image(tmp_path / "0" / "00.jpg", 0, (40, 40), quality=100)
    sample = replace(files, images=find_images(str(tmp_path))).encoded(0, np.random.default_rng(0))
    assert sample[BOXES][ENCODED] == 0
    assert sample[PIXELS].ndim == 3


def test_rows_beside_places() -> None:
    assert other_rows([], 5) == [slice(0, 5)]
    assert other_rows([0, 1, 4], 5) == [slice(2, 4)]
    assert other_rows([1, 3], 5) == [slice(0, 1), slice(2, 3), slice(4, 5)]
    assert other_rows([0, 1], 2) == []


@pytest.mark.parametrize(
    ("decoder", "fault"),
    [
        (PlainDecoder(), ""),
        (PlainDecoder(error=1), ""),
        (PlainDecoder(error=8), "levels of 255 away"),
        (PlainDecoder(lambda content: True), "21 of 21 images are not decoded"),
    ],
)
def test_a_decoder_is_checked(files: ImageFiles, decoder: PlainDecoder, fault: str) -> None:
    checked = check_decoder(decoder, encoded_samples(files, 0), CPU)
    assert fault in checked.fault
    assert bool(checked.fault) == bool(fault)
    assert decoder.calls in (1, 8)


def test_a_decoder_whose_pixels_change_is_found_out(files: ImageFiles) -> None:
    class Drifting(PlainDecoder):
        def decode(self, encoded: Sequence[np.ndarray], rooms: Sequence[Tensor]) -> list[bool]:
            done = super().decode(encoded, rooms)
            rooms[3][0, 0, 0] += self.calls > 6
            return done

    assert "other pixels each time" in check_decoder(Drifting(), encoded_samples(files, 0), CPU).fault


def damaged_in_the_middle(file: Path) -> bytes:
    """What a decoder in hardware takes for sound, and libjpeg-turbo does not."""
    content = bytearray(file.read_bytes())
    half = len(content) // 2
    content[half:-2] = b"\xff\xd0" * ((len(content) - 2 - half) // 2) + content[half:-2][: (len(content) - half) % 2]
    file.write_bytes(content)
    return bytes(content)


def test_a_damaged_file_among_the_first_is_left_for_its_turn(files: ImageFiles) -> None:
    damaged_in_the_middle(Path(files.images.path(5)))
    samples = encoded_samples(files, 0)
    assert len(samples) == 20
    assert not check_decoder(PlainDecoder(), samples, CPU).fault


def test_a_few_that_are_refused_are_no_fault(files: ImageFiles) -> None:
    samples = encoded_samples(files, 0)
    known = samples[4].content.tobytes()
    assert not check_decoder(PlainDecoder(lambda content: content.tobytes() == known), samples, CPU).fault


def test_a_replacement_that_is_refused_is_read_as_a_worker_reads_it(files: ImageFiles) -> None:
    """The worker's second attempt has other random numbers than the replacement's own first."""
    for number in range(0, 20, 2):
        Path(files.images.path(number)).write_bytes(b"")
    with (
        batches(files, 0) as plain,
        batches(files, 8) as left,
        decoding(files, PlainDecoder(lambda _: True)) as decoder,
    ):
        for one, other in zip(plain, left, strict=True):
            sent, decoded = finished(decoder, other)
            assert_alike(sent, decoded, one)


@pytest.mark.skipif(not dali_is_installed(), reason="DALI is not installed: pip install 'hotloop[dali]'")
def test_dali_decodes_as_the_workers_do(files: ImageFiles) -> None:
    samples = encoded_samples(files, 0)
    decoder = DaliDecoder(CPU, SAMPLES)
    checked = check_decoder(decoder, samples, CPU)
    assert not checked.fault
    assert checked.difference < 0.5
    broken = np.frombuffer(b"\xff\xd8 nothing", np.uint8)
    room = torch.zeros(4, 4, 3, dtype=torch.uint8)
    assert decoder.decode([samples[0].content, broken], [room, room]) == [False, False]
    assert not check_decoder(decoder, samples, CPU).fault, "it goes on after a damaged image"
