"""An ImageFolder's random crops, cut and scaled on the GPU by hotloop's own loader, in the script's order."""

import weakref
from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, default_collate

from hotloop.accelerate.host_tensor import HostTensor
from hotloop.accelerate.image_folder import MAX_PIXELS, Recipe
from hotloop.accelerate.lanes import How, IndexSource, LaneIndices, LaneOfIndices
from hotloop.accelerate.pace import Stock
from hotloop.data.columns import Column, Texts
from hotloop.data.dataset import Dataset
from hotloop.data.image_list import ImageList
from hotloop.data.images import ImageFiles
from hotloop.data.loader import Batch, Loader, Loaders, LoaderSettings
from hotloop.kernels.resample import resample, resample_plain
from hotloop.train.host_memory import page_locked
from hotloop.train.source import LoaderSource


def obstacle(loader: Any) -> str:
    """Why a loader's batches cannot be made here; empty if they can."""
    if loader.collate_fn is not default_collate:
        return "the script puts its batches together in another way"
    if type(loader.batch_sampler) is not BatchSampler or not loader.batch_size:
        return "batches have no fixed size"
    return ""


class _InScriptsOrder:
    """A loader whose batches are those that the script's sampler asks for.

    Attributes:
        encoded: see `Loader`.
    """

    def __init__(self, loader: Loader) -> None:
        self.indices: Iterable[Sequence[int]] = ()
        self.settings = loader.settings
        self.damages = loader.damages
        self.encoded = 0
        self._loader = loader
        self._numbers = count()

    @property
    def dataset(self) -> Dataset:
        return self._loader.dataset

    @property
    def workers(self) -> int:
        return self._loader.workers

    @property
    def under_way(self) -> int:
        return self._loader.under_way

    def __len__(self) -> int:
        return len(self._loader)

    def size(self, number: int) -> int:
        return self._loader.size(number)

    def batches(self, epoch: int = 0, start: int = 0, epochs: int = 1) -> Generator[Batch]:
        # Crops are drawn by the batch's number: one that has been used would give the same ones again.
        first = next(self._numbers) << 32
        return self._loader.batches_of(self.indices, first)


class DeviceImages(LaneOfIndices):
    """A lane, see `Lane`, whose images lie on the GPU before they are asked for, uint8 on their way there.

    Page-locked memory: four batches, and twice the pixels of a side: 0.6 GB for 256 images of 224 pixels. On the GPU
    0.5 GB for the same.

    Args:
        device: where the script moves the images.
    """

    is_own = False
    is_ready = False
    """One batch is on its way while the script has the one before: asking for it earlier brings nothing."""
    stock = Stock()
    """Four batches at most: none are counted."""

    def __init__(
        self, loader: Any, recipe: Recipe, how: How, source: IndexSource, seed: int, device: torch.device
    ) -> None:
        self._indices = LaneIndices(source)
        self._recipe = recipe
        self._is_pinned = how.pin_memory
        images = images_of(loader.dataset)
        self._labels = images.labels.array
        mean, std = recipe.mean or (0.0, 0.0, 0.0), recipe.std or (1.0, 1.0, 1.0)
        self._mean, self._scale = (torch.tensor(mean) * 255).to(device), (1 / (torch.tensor(std) * 255)).to(device)
        files = ImageFiles(images, recipe.size, recipe.crop, MAX_PIXELS, resize=False)
        settings = LoaderSettings(loader.batch_size, seed & 0xFFFFFFFF, on_damaged="raise")
        with ExitStack() as stack:
            [made] = stack.enter_context(Loaders([(files, settings)], how.workers, imports_main=False))
            stack.enter_context(page_locked(made.memory) if device.type == "cuda" else nullcontext())
            # Passes that are left early are merely forgotten, as torch's are.
            self._close = weakref.finalize(self, stack.pop_all().close)
        self._order = _InScriptsOrder(made)
        self._source = LoaderSource(self._order, device)
        self._begin()

    def _begin(self) -> None:
        self._order.indices = self._indices
        self._batches = self._source.batches()

    @property
    def iterator(self) -> "DeviceImages":
        """It is its own."""
        return self

    def restart(self, source: IndexSource) -> None:
        """Another pass with the same workers."""
        self._batches.close()
        self._indices.restart(source)
        self._begin()

    def next(self) -> list[Tensor]:
        """The images, and their classes.

        Raises:
            StopIteration: there is no more.
            DamagedSample: a file cannot be read.
        """
        found = next(self._batches)
        self._indices.under_way.popleft()
        pixels, boxes = found.tensors["pixels"], found.tensors["boxes"]
        by = resample if pixels.is_cuda else resample_plain
        images = by(pixels, boxes, self._mean, self._scale, self._recipe.size, torch.float32).contiguous()
        labels = torch.from_numpy(self._labels[found.indices])
        return [HostTensor(images), labels.pin_memory() if self._is_pinned else labels]

    def end(self) -> None:
        """Its workers end."""
        self._batches.close()
        self._close()

    def leave(self) -> None:
        """The process ends; so do its workers, once nobody is at the other end."""
        self._close()


def images_of(dataset: Any) -> ImageList:
    """The files of an ImageFolder."""
    names = Texts.of(path for path, _ in dataset.samples)
    labels = Column(np.asarray([label for _, label in dataset.samples], np.int64))
    return ImageList(names, labels, tuple(dataset.classes), base="", origin=str(dataset.root))
