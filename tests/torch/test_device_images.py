"""Images that lie on the device already, where a script expects them in the host's memory."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

from hotloop.accelerate.copies import target_of
from hotloop.accelerate.device_images import obstacle
from hotloop.accelerate.host_tensor import HostTensor
from hotloop.accelerate.lanes import How
from hotloop.accelerate.loading import Loading
from hotloop.accelerate.waiting import image_lane

CPU = torch.device("cpu")
SIZE = 32


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """JPEG files whose brightness is their number."""
    for number in range(30):
        at = tmp_path / "images" / f"class{number % 3}"
        at.mkdir(parents=True, exist_ok=True)
        rows = np.linspace(0, 40, 48, dtype=np.uint8)[:, None, None]
        pixels = np.full((48, 48, 3), number * 5, np.uint8) + rows
        Image.fromarray(pixels).save(at / f"{number:02}.jpg", quality=95)
    return tmp_path / "images"


def a_loader(folder: Path, workers: int = 1, **options: Any) -> DataLoader[Any]:
    whole = transforms.RandomResizedCrop(SIZE, scale=(1.0, 1.0), ratio=(1.0, 1.0))
    stack = [whole, transforms.ToTensor(), transforms.Normalize((0.4, 0.5, 0.6), (0.2, 0.3, 0.4))]
    data = datasets.ImageFolder(str(folder), transforms.Compose(stack))
    generator = torch.Generator().manual_seed(0)
    return DataLoader(data, 4, shuffle=True, num_workers=workers, generator=generator, **options)


@pytest.fixture
def failures() -> list[str]:
    return []


@pytest.fixture
def loading(failures: list[str]) -> Iterator[Loading]:
    made = Loading(lambda why, name="loader": failures.append(why))
    made.make_lane = image_lane
    made.install()
    yield made
    made.remove()


ON_DEVICE = How(2, 2, False, images=True, device=CPU)


def test_the_scripts_order_and_its_pixels(folder: Path, loading: Loading, failures: list[str]) -> None:
    """Through three passes, from the middle of the first one on; labels are exact, pixels to the resize's tolerance."""
    plain = [list(loader) for loader in [a_loader(folder)] for _ in range(3)]
    loader, kinds = a_loader(folder), []
    for expected in plain:
        found = []
        for images, labels in loader:
            found.append((images, labels))
            kinds.append(type(images))
            if len(kinds) == 2:
                loading.set_how(lambda loader: ON_DEVICE)
        assert len(found) == len(expected)
        for (images, labels), (plain_images, plain_labels) in zip(found, expected, strict=True):
            assert labels.tolist() == plain_labels.tolist()
            torch.testing.assert_close(images + 0, plain_images, atol=0.03, rtol=0)
    assert kinds[0] is torch.Tensor
    assert set(kinds[8:]) == {HostTensor}
    assert failures == []


def test_back_to_the_scripts_own_way_in_the_middle(folder: Path, loading: Loading, failures: list[str]) -> None:
    plain = [labels.tolist() for _, labels in a_loader(folder)]
    loading.set_how(lambda loader: ON_DEVICE)
    found = []
    for _, labels in a_loader(folder):
        found.append(labels.tolist())
        if len(found) == 3:
            loading.set_how(None)
    assert found == plain
    assert failures == []


def test_workers_end_at_once_when_the_process_does(folder: Path, loading: Loading) -> None:
    """Left to torch, a process that ends waits five seconds for each."""
    loading.set_how(lambda loader: How(2, 2, False))
    iterator = iter(a_loader(folder))
    next(iterator)
    workers = iterator._workers
    loading.leave()
    for worker in workers:
        worker.join(5)
    assert [worker.is_alive() for worker in workers] == [False, False]


def test_a_file_that_cannot_be_read_is_the_scripts_own_affair(
    folder: Path, loading: Loading, failures: list[str]
) -> None:
    (folder / "class1/04.jpg").write_bytes(b"no image")
    loading.set_how(lambda loader: ON_DEVICE)
    with pytest.raises(Exception, match="cannot identify image file"):
        list(a_loader(folder, workers=0))


def test_passes_differ_where_crops_are_drawn(folder: Path, loading: Loading) -> None:
    loading.set_how(lambda loader: ON_DEVICE)
    stack = [transforms.RandomResizedCrop(SIZE), transforms.ToTensor()]
    data = datasets.ImageFolder(str(folder), transforms.Compose(stack))
    loader = DataLoader(data, 4, num_workers=1)
    first, second = ([images + 0 for images, _ in loader] for _ in range(2))
    assert not any(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_other_ways_of_putting_batches_together_are_left(folder: Path) -> None:
    assert obstacle(a_loader(folder)) == ""
    assert "another way" in obstacle(a_loader(folder, collate_fn=list))
    loader = a_loader(folder)
    by_hand = DataLoader(loader.dataset, batch_sampler=[[1, 2], [3]])
    assert "no fixed size" in obstacle(by_hand)


def test_a_host_tensor_answers_what_needs_no_values_without_them() -> None:
    values = torch.randn(4, 3, 2, 2)
    tensor = HostTensor(values)
    assert isinstance(tensor, torch.Tensor)
    assert (tensor.shape, tensor.dtype, tensor.device, tensor.dim(), len(tensor)) == (
        values.shape, torch.float32, CPU, 4, 4,
    )  # fmt: skip
    assert (tensor.size(0), tensor.numel(), tensor.is_cuda, tensor.requires_grad) == (4, 48, False, False)
    assert tensor.host is None


def test_a_host_tensor_is_its_values_once_they_are_asked_for() -> None:
    values = torch.randn(4, 3)
    torch.testing.assert_close(HostTensor(values) * 2, values * 2, atol=0, rtol=0)
    assert type(HostTensor(values)[0]) is torch.Tensor
    assert HostTensor(values).numpy().tolist() == values.tolist()
    assert repr(HostTensor(values)) == repr(values)
    assert torch.equal(torch.stack([HostTensor(values), values])[0], values)
    assert HostTensor(values).pin_memory is not None


def test_what_is_written_into_a_host_tensor_counts() -> None:
    tensor = HostTensor(torch.ones(3))
    tensor.mul_(2)
    tensor[0] = 7
    assert tensor.tolist() == [7, 2, 2]
    assert tensor.moved().tolist() == [7, 2, 2]


def test_what_is_moved_is_the_scripts_own() -> None:
    tensor = HostTensor(torch.ones(3))
    tensor.moved().mul_(5)
    assert tensor.moved().tolist() == [1, 1, 1]
    assert (tensor + 0).tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "device"),
    [
        ("to", ("cuda:1",), {}, "cuda:1"),
        ("to", (torch.device("cuda"), torch.float16), {"non_blocking": True}, "cuda"),
        ("to", (), {"device": "cuda", "memory_format": torch.channels_last, "copy": True}, "cuda"),
        ("to", (torch.float16,), {}, None),
        ("to", ("cpu",), {}, "cpu"),
        ("to", (torch.zeros(1),), {}, "cpu"),
        ("to", (), {"other": torch.zeros(1, device="meta")}, "meta"),
        ("cuda", (), {"non_blocking": True}, "cuda"),
        ("cuda", (2,), {}, "cuda:2"),
        ("cuda", (), {"device": torch.device("cuda", 1)}, "cuda:1"),
    ],
)
def test_where_a_call_moves_a_tensor(name: str, args: Any, kwargs: Any, device: str | None) -> None:
    assert target_of(name, args, kwargs) == (torch.device(device) if device else None)
