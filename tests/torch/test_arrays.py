"""Data in arrays: the same order and numbers as from workers, gathered on the device."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_training import run, stop_at

from hotloop import ArrayDataset, InputError, Loaders, LoaderSettings
from hotloop.core.job import Job
from hotloop.core.job_file import parse_job
from hotloop.data.image_arrays import load_images
from hotloop.data.random import sample_numbers
from hotloop.tasks.augment import Crops
from hotloop.tasks.images import ImageClassification
from hotloop.tasks.task import RANDOM
from hotloop.train.source import ArraySource, LoaderSource

CPU = torch.device("cpu")


def numbered(samples: int) -> ArrayDataset:
    return ArrayDataset({"x": np.arange(samples, dtype=np.float32), "y": np.arange(samples)[:, None] * 10})


@given(samples=st.integers(1, 40), batch=st.integers(1, 12), drop=st.booleans(), start=st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_arrays_come_in_the_order_of_a_loader(samples: int, batch: int, drop: bool, start: int) -> None:
    chosen = LoaderSettings(min(batch, samples), seed=3, drop_last=drop)
    arrays = ArraySource(numbered(samples), chosen, CPU, numbers=2)
    with Loaders([(numbered(samples), chosen)], 0) as loaders:
        source = LoaderSource(loaders[0], CPU, numbers=2)
        pairs = zip(arrays.batches(1, start, 2), source.batches(1, start, 2), strict=True)
        for mine, theirs in pairs:
            own, other = arrays.expand(mine.tensors), source.expand(theirs.tensors)
            assert own.keys() == other.keys()
            assert all(torch.equal(own[name], other[name]) for name in own)
            assert (mine.epoch, mine.number, mine.size) == (theirs.epoch, theirs.number, theirs.size)
            assert mine.size == arrays.size(mine.number)
            assert np.array_equal(mine.indices, theirs.indices)


def test_arrays_of_another_byte_order_are_turned() -> None:
    dataset = ArrayDataset({"x": np.arange(6, dtype=">i4").reshape(3, 2), "y": np.arange(3, dtype=">f8")})
    assert all(array.dtype.isnative for array in dataset.arrays.values())
    assert dataset.sample(2, np.random.default_rng())["x"].tolist() == [4, 5]


def test_random_numbers_depend_on_seed_epoch_and_sample_alone() -> None:
    first = sample_numbers(1, 2, 100, 3)
    assert np.array_equal(first, sample_numbers(1, 2, 100, 3))
    assert not np.array_equal(first, sample_numbers(1, 3, 100, 3))
    assert not np.array_equal(first, sample_numbers(2, 2, 100, 3))
    assert 0 <= first.min() < 0.05 < 0.95 < first.max() < 1


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({}, "none"),
        ({"x": np.zeros(3), "y": np.zeros(4)}, "x 3, y 4"),
        ({"x": np.array(["a", "b"])}, "of type <U1"),
        ({"x": np.array(3.0), "y": np.zeros(4)}, "different lengths"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(arrays: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ArrayDataset(arrays)


def job(tmp_path: Path, run_dir: str, **changes: Any) -> Job:
    """Two classes of 8 × 8 images, told apart by their brighter half."""
    file = tmp_path / "images.npz"
    if not file.exists():
        random = np.random.default_rng(0)
        images = random.integers(0, 80, (50, 8, 8, 3), dtype=np.uint8)
        labels = np.arange(50) % 2
        images[labels == 1, :4] += 150
        images[labels == 0, 4:] += 150
        np.savez(file, images=images, labels=labels, classes=np.array(["down", "up"]))
    raw: dict[str, Any] = {
        "task": {"image_size": 8, "augment": {"crop_scale": [0.7, 1.0], "flip": 0.5}},
        "data": {"train": str(file), "val": str(file), "batch_size": 16},
        "model": {"name": "tiny:cnn"},
        "train": {"epochs": 12},
        "optimizer": {"learning_rate": 0.05},
        "log": {"tensorboard": False, "report": False},
        "run": {"dir": str(tmp_path / run_dir)},
    }
    for key, value in changes.items():
        section, name = key.split("__")
        raw.setdefault(section, {})[name] = value
    return parse_job(raw, "job")


def test_classes_of_the_validation_go_by_their_names(tmp_path: Path) -> None:
    file, other = tmp_path / "images.npz", tmp_path / "other.npz"
    job(tmp_path, "unused")
    arrays = dict(np.load(file))
    np.savez(other, images=arrays["images"], labels=1 - arrays["labels"], classes=np.array(["up", "down"]))
    _, result = run(job(tmp_path, "run", data__val=str(other)))
    assert result.metrics["val_accuracy"] == 1.0
    np.savez(other, images=arrays["images"], labels=arrays["labels"], classes=np.array(["up", "left"]))
    with pytest.raises(InputError, match="labels and classes do not fit") as caught:
        run(job(tmp_path, "never", data__val=str(other)))
    assert "has no class left" in caught.value.cause


def test_classes_of_one_name_in_another_order_are_refused(tmp_path: Path) -> None:
    train, val = tmp_path / "train.npz", tmp_path / "val.npz"
    images, labels = np.zeros((3, 8, 8, 3), np.uint8), np.arange(3)
    np.savez(train, images=images, labels=labels, classes=np.array(["crane", "crane", "owl"]))
    classes = load_images(str(train)).classes
    assert load_images(str(train), classes).dataset.arrays["labels"].tolist() == [0, 1, 2], "the order tells them apart"
    np.savez(val, images=images, labels=labels, classes=np.array(["crane", "owl", "crane"]))
    for trained in (classes, ("crane", "owl")):
        with pytest.raises(InputError, match='which class "crane" is meant cannot be told'):
            load_images(str(val), trained)


def test_images_in_an_array_train_and_continue_bit_for_bit(tmp_path: Path) -> None:
    _, through = run(job(tmp_path, "a"))
    assert through.metrics["val_accuracy"] == 1.0
    _, first = run(job(tmp_path, "b", log__every=1), stop_at(7))
    _, second = run(job(tmp_path, "b"))
    assert (first.status, second.status) == ("preempted", "finished")
    assert second.weights_sha256 == through.weights_sha256


def test_their_preparation_is_one_piece_for_the_compiler(tmp_path: Path) -> None:
    task = ImageClassification(job(tmp_path, "run", task__augment={"crop_scale": [0.5, 1.0]}))
    batch = {"images": images(3).permute(0, 2, 3, 1).to(torch.uint8), "labels": torch.arange(3)}
    batch[RANDOM] = torch.rand(3, task.random_numbers, generator=torch.Generator().manual_seed(0))
    whole = torch.compile(partial(task.prepare, training=True), backend="eager", fullgraph=True)
    torch.testing.assert_close(whole(batch), task.prepare(batch, training=True))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"images": np.zeros((4, 8, 8, 3), np.uint8)}, "it needs images and labels"),
        ({"images": np.zeros((4, 8, 8, 3)), "labels": np.arange(4)}, "have to be uint8"),
        ({"images": np.zeros((4, 8, 8, 3), np.uint8), "labels": np.zeros(4)}, "have to be integers"),
        ({"images": np.zeros((4, 8, 8, 3), np.uint8), "labels": np.arange(3)}, "different lengths"),
        ({"images": np.zeros((4, 8, 8, 3), np.uint8), "labels": np.arange(4) - 1}, "labels from -1 to 2"),
        ({"images": np.zeros((4, 8, 8, 2), np.uint8), "labels": np.arange(4)}, r"\(N, H, W, 3\)"),
    ],
)
def test_other_arrays_are_refused(tmp_path: Path, arrays: dict[str, np.ndarray], message: str) -> None:
    np.savez(tmp_path / "images.npz", **arrays)
    with pytest.raises(InputError, match=message):
        run(job(tmp_path, "run"))


def test_no_zip_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "images.npz").write_bytes(b"no array")
    with pytest.raises(InputError, match="cannot read"):
        run(job(tmp_path, "run"))


def test_a_shift_with_files_is_refused(make_images: Any, tmp_path: Path) -> None:
    folder = make_images()
    with pytest.raises(InputError, match=r"task\.augment\.shift = 2 with image files"):
        run(job(tmp_path, "run", data__train=str(folder), data__val=str(folder), task__augment={"shift": 2}))


def images(count: int, size: int = 6) -> torch.Tensor:
    return torch.randint(0, 256, (count, 3, size, size), generator=torch.Generator().manual_seed(0)).float()


def test_without_draws_a_cut_is_the_image() -> None:
    batch = images(5)
    assert torch.allclose(Crops().cut(batch, torch.rand(5, 5), 6), batch, atol=1e-3)


def test_a_flip_mirrors_and_a_shift_moves_whole_pixels() -> None:
    batch = images(2)
    random = torch.tensor([[0, 0, 0.5, 0.5, 0.0], [0, 0, 0.99, 0.0, 0.9]])
    flipped, moved = Crops(flip=0.5, shift=2).cut(batch, random, 6)
    assert torch.allclose(flipped, batch[0].flip(2), atol=1e-2)
    assert torch.allclose(moved[:, 2:, :4], batch[1][:, :4, 2:], atol=1e-2)
    assert torch.allclose(moved[:, :2, :4], batch[1][:, :2, 2:].flip(1), atol=1e-2), "edges are mirrored"


@given(seed=st.integers(0, 10**6), low=st.floats(0.1, 1.0), flip=st.floats(0, 1))
@settings(max_examples=40, deadline=None)
def test_crops_stay_inside_and_have_the_asked_area(seed: int, low: float, flip: float) -> None:
    random = torch.rand(50, 5, generator=torch.Generator().manual_seed(seed))
    boxes = Crops((low, 1.0), (0.75, 4 / 3), flip).boxes(random, 32, 32)
    share_x, share_y = boxes[:, 0, 0].abs(), boxes[:, 1, 1]
    assert (share_x + boxes[:, 0, 2].abs() <= 1 + 1e-5).all()
    assert (share_y + boxes[:, 1, 2].abs() <= 1 + 1e-5).all()
    area = share_x * share_y
    whole = (share_x < 1) & (share_y < 1)
    assert torch.allclose(area[whole], low + (1 - low) * random[whole, 0], atol=1e-4)
