"""Accelerations of the way that batches take: their loading, an ImageFolder's decoding, their copies to a GPU."""

import multiprocessing
import threading
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

from hotloop.accelerate.copies import Copies
from hotloop.accelerate.lanes import How, IndexSource, Lane
from hotloop.accelerate.loading import Loading
from hotloop.accelerate.training import Training
from hotloop.data.loader import workers_for

_WAITS = 0.02
"""Share of a step spent waiting for batches from which on they are worth other means."""
_BUSY = 0.7
_CROWDS = 0.5
"""Share of their time that workers are on a processor, or would be if one were free, from which on their work takes
processors from the training though this need not wait for them: more workers than are needed are not always busy.
"""
_MORE = 4
"""Workers that are on a processor for less of their time wait for something else; so many times more wait at once."""
_MOST = 64


class Batches:
    """What the accelerations of loading have in common: one way in which batches are made.

    Attributes:
        copies: that the script makes of batches to a GPU, if it trains on one.
        device: the GPU where images are cut and scaled; None: that is done by the workers.
    """

    def __init__(self, loading: Loading) -> None:
        self.loading = loading
        self.copies: Copies | None = None
        self.device: torch.device | None = None
        self.workers: Callable[[Any], int] | None = None
        self.prefetch_factor = 0
        self.images = False
        self.beside_gpu = False

    def watch(self, device: torch.device) -> None:
        """Learn what the script moves to the GPU."""
        if device.type == "cuda" and not self.copies:
            self.copies = self.loading.passing = Copies(device)

    def changed(self) -> None:
        """Make batches in the way that is set now."""
        self.loading.set_how(self._how if self.workers or self.images else None)

    def _how(self, loader: Any) -> How:
        workers = self.workers(loader) if self.workers else loader.num_workers
        factor = self.prefetch_factor or max(loader.prefetch_factor or 2, 2)
        pinned = loader.pin_memory or (self.workers is not None and self.beside_gpu)
        return How(workers, factor, pinned, self.images, self.device if self.images and workers else None)


class LoaderWorkers:
    """Worker processes as the machine has processors for, or more where they wait for a disk or network; kept between
    epochs; batches in page-locked memory beside a GPU.
    """

    name = "loader"

    def __init__(self, batches: Batches, busy: Callable[[], float]) -> None:
        self._batches = batches
        self._busy = busy

    @property
    def count(self) -> int:
        """Batches so far."""
        return self._batches.loading.batches

    def unfit(self, training: Training) -> str:
        current = self._batches.loading.current()
        if not current and threading.current_thread() is not threading.main_thread():
            return "batches are taken by a thread that was not known to train when it asked for them"
        if not current:
            return "no DataLoader of indexed samples gives the batches"
        if training.waits < _WAITS:
            return f"waiting for batches is {training.waits:.1%} of a step"
        if (way := _start_method(current.loader)) != "fork":
            return f"workers are started by {way}, which takes seconds for each"
        return ""

    def switch_on(self, training: Training) -> None:
        beside_gpu = self._batches.beside_gpu = training.device.type == "cuda"
        suited = workers_for(training.processors, accelerated=True) if beside_gpu else training.processors
        waiting, asked = self._busy() < _BUSY, training.plan.workers

        def workers(loader: Any) -> int:
            more = max(suited, int(loader.num_workers))
            return asked or (min(_MOST, _MORE * more) if waiting else more)

        self._batches.workers = workers
        self._batches.prefetch_factor = training.plan.prefetch_factor
        self._batches.changed()

    def switch_off(self) -> None:
        self._batches.workers = None
        self._batches.changed()


def _start_method(loader: Any) -> str:
    """How the script wants a DataLoader's workers to be started; fork if it does not mind."""
    if loader.multiprocessing_context:
        return str(loader.multiprocessing_context.get_start_method())
    return multiprocessing.get_start_method(allow_none=True) or "fork"


class ImageFolder:
    """Random crops of an ImageFolder by our own decoder, where the script waits for them or workers are busy with them.

    Args:
        busy: share of the time in which a worker was on a processor or waited for one.
    """

    name = "image_folder"

    def __init__(self, batches: Batches, busy: Callable[[], float]) -> None:
        self._batches = batches
        self._busy = busy
        self.count = 0

    def unfit(self, training: Training) -> str:
        try:
            from hotloop.accelerate.image_folder import recipe_of
        except ImportError as error:
            return f"it is not installed where the script runs: {error.name}"

        current = self._batches.loading.current()
        if not current or not recipe_of(current.loader.dataset):
            return "no ImageFolder with RandomResizedCrop, flip, ToTensor and Normalize gives the batches"
        if training.waits >= _WAITS:
            return ""
        waits, busy = f"waiting for batches is {training.waits:.1%} of a step", self._busy()
        if not current.stock.workers or not training.plan.measure:
            return waits
        return "" if busy >= _CROWDS else f"{waits}, and workers are busy {busy:.0%} of the time"

    def switch_on(self, training: Training) -> None:
        self.count = 1
        training.must_help = training.waits < _WAITS
        self._batches.loading.make_lane = image_lane
        self._batches.images = True
        self._batches.device = self._moved_to()
        self._batches.changed()

    def _moved_to(self) -> torch.device | None:
        """The GPU to which the script moves the images."""
        current, copies = self._batches.loading.current(), self._batches.copies
        if not current or not copies or not find_spec("triton"):
            return None
        return copies.moved(current.loader).get(_IMAGES)

    def switch_off(self) -> None:
        self._batches.images = False
        self._batches.changed()


_IMAGES = 0
"""Their place in a batch of images and labels."""


def image_lane(loader: Any, how: How, source: IndexSource, seed: int) -> Any:
    """A lane with images by our own decoder, where it is of images that this can make."""
    from hotloop.accelerate.device_images import DeviceImages, obstacle
    from hotloop.accelerate.image_folder import Images, recipe_of

    recipe = recipe_of(loader.dataset) if how.images else None
    if recipe and how.device and not obstacle(loader):
        return DeviceImages(loader, recipe, how, source, seed, how.device)
    return Lane(loader, Images(loader.dataset, recipe) if recipe else loader.dataset, how, source, seed)


class Prefetch:
    """Batches copied to the GPU before they are asked for there."""

    name = "prefetch"

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    @property
    def count(self) -> int:
        """Copies that were there in time."""
        return self._batches.copies.count if self._batches.copies else 0

    def unfit(self, training: Training) -> str:
        if not self._batches.copies:
            return "there is no GPU"
        return "" if self._batches.loading.current() else "no DataLoader of indexed samples gives the batches"

    def switch_on(self, training: Training) -> None:
        assert self._batches.copies
        self._batches.copies.is_on = True

    def switch_off(self) -> None:
        assert self._batches.copies
        self._batches.copies.is_on = False
