"""Image classification.

Shape suffixes: B batch, H height, W width, C channels, K classes.
"""

from collections.abc import Sequence
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from hotloop.core.errors import InputError
from hotloop.core.job import ImagesTask, Job
from hotloop.data.dataset import Dataset
from hotloop.data.image_arrays import ImageArrays, is_image_array, load_images
from hotloop.data.image_list import ImageList, find_images
from hotloop.data.images import CenterCrop, ImageFiles, RandomCrop
from hotloop.tasks.augment import RANDOM_NUMBERS, Crops
from hotloop.tasks.models import build_model
from hotloop.tasks.task import IGNORED, RANDOM, Example, Split, Task, Tensors

if TYPE_CHECKING:  # used by few jobs, and torchvision takes most of a second to load
    from torchvision.transforms import v2


class ImageClassification(Task):
    """Images of class folders or lists to classes.

    Batches travel as uint8 (B, H, W, C) and become float (B, C, H, W) on the device, in the layout that
    `speed.channels_last` says.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        assert isinstance(job.task, ImagesTask)
        self.settings = job.task
        self._layout = torch.channels_last if job.speed.channels_last is True else torch.contiguous_format
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (self.settings.mean, self.settings.std))
        device = "cpu" if job.device == "auto" else job.device  # there before the first batch, or each would copy them
        self._mean, self._scale = (255 * mean).to(device), (1 / (255 * std)).to(device)
        # Not cached properties: before Python 3.12 those take a lock when first asked for, which the compiler refuses.
        augment = self.settings.augment
        self._crops = Crops(augment.crop_scale, augment.crop_ratio, augment.flip, augment.shift)
        self._randaugment = _randaugment(augment.randaugment) if augment.randaugment else None
        self._mixes = bool(augment.mixup or augment.cutmix)
        self._dtype = _type_of_images(job, self._mixes)

    @property
    def prepare_is_pure(self) -> bool:  # type: ignore[override]
        """RandAugment, MixUp and CutMix draw on the host."""
        return not self._randaugment and not self._mixes

    @property
    def prepare_is_apart(self) -> bool:  # type: ignore[override]
        return self.prepare_is_pure and type(self).prepare is ImageClassification.prepare

    @property
    def padding_obstacle(self) -> str:
        return "MixUp and CutMix mix the blank samples in" if self._mixes else ""

    @property
    def random_numbers(self) -> int:  # type: ignore[override]
        """Files are cropped where they are decoded, arrays on the device."""
        return RANDOM_NUMBERS if is_image_array(self.job.data.train) else 0

    @cached_property
    def train_images(self) -> ImageList | ImageArrays:
        location = self.job.data.train
        return load_images(location) if is_image_array(location) else self._find(location)

    def _find(self, location: str, classes: Sequence[str] | None = None, key: str = "data.train") -> ImageList:
        return find_images(location, classes, key, self.job.data.cache_gib * 2**30)

    def data(self, split: Split) -> Dataset | None:
        if split == "train":
            images = self.train_images
        elif self.job.data.val is None:
            return None
        elif is_image_array(self.job.data.val):
            images = load_images(self.job.data.val, self.train_images.classes)
        else:
            images = self._find(self.job.data.val, self.train_images.classes, "data.val")
        if isinstance(images, ImageArrays):
            return images.dataset
        settings, augment = self.settings, self.settings.augment
        if split == "train" and augment.shift:
            what = f"task.augment.shift = {augment.shift} with image files"
            raise InputError(what, "files are varied by crops", "--set task.augment.shift=0, and crop_scale instead")
        random = RandomCrop(augment.crop_scale, augment.crop_ratio, augment.flip)
        crop = random if split == "train" else CenterCrop(settings.center_crop)
        return ImageFiles(
            images, settings.image_size, crop, settings.max_pixels, not self._resizes_on_device,
            crops_alone=self.job.data.decode != "cpu",
        )  # fmt: skip

    def model(self) -> nn.Module:
        return build_model(self.job.model.name, len(self.train_images.classes), self.job.model.arguments)

    def prepare(self, batch: Tensors, training: bool) -> Tensors:
        labels = batch["labels"]
        if "pixels" in batch and not (training and self._randaugment):
            images_BCHW = self._resampled(batch, self._mean, self._scale, self._dtype)
            return self._mixed(images_BCHW.contiguous(memory_format=self._layout), labels, training)
        images_BCHW = self._images(batch).permute(0, 3, 1, 2)
        if training and RANDOM in batch:
            images_BCHW = self._crops.cut(images_BCHW.float(), batch[RANDOM], self.settings.image_size)
        elif images_BCHW.shape[2:] != (self.settings.image_size, self.settings.image_size):
            images_BCHW = self._middle(images_BCHW)
        if training and self._randaugment:
            images_BCHW = self._randaugment(images_BCHW.to(torch.uint8))
        mean, scale = self._mean.to(images_BCHW.device), self._scale.to(images_BCHW.device)
        images_BCHW = ((images_BCHW.float() - mean) * scale).contiguous(memory_format=self._layout)
        return self._mixed(images_BCHW, labels, training)

    def forward(self, model: nn.Module, batch: Tensors) -> Tensor:
        logits_BK: Tensor = model(batch["images"])
        return logits_BK

    def loss(self, outputs: Tensor, batch: Tensors) -> Tensor:
        return functional.cross_entropy(outputs, batch["labels"], label_smoothing=self.settings.label_smoothing)

    def ignore(self, batch: Tensors, valid: Tensor) -> Tensors:
        return {**batch, "labels": torch.where(valid, batch["labels"], IGNORED)}

    def metrics(self, outputs: Tensor, batch: Tensors) -> dict[str, Tensor]:
        return {"accuracy": (outputs.argmax(1) == batch["labels"]).float().mean()}

    def examples(self, outputs: Tensor, batch: Tensors, names: Sequence[str]) -> list[Example]:
        classes = self.train_images.classes
        predictions, labels = outputs.argmax(1).tolist(), batch["labels"].tolist()
        return [
            Example(name, classes[label], classes[prediction], label == prediction, pixels)
            for name, label, prediction, pixels in zip(names, labels, predictions, self._images(batch), strict=True)
        ]

    def _mixed(self, images_BCHW: Tensor, labels: Tensor, training: bool) -> Tensors:
        if training and self._mixes and len(labels) > 1:
            images_BCHW, labels = self._mix(images_BCHW, labels)
        return {"images": images_BCHW, "labels": labels}

    def _images(self, batch: Tensors) -> Tensor:
        """The batch's images, uint8 (B, H, W, C)."""
        if "pixels" not in batch:
            return batch["images"]
        images_BCHW = self._resampled(batch, torch.zeros_like(self._mean), torch.ones_like(self._scale), torch.float32)
        return images_BCHW.round().to(torch.uint8).permute(0, 2, 3, 1)

    def _resampled(self, batch: Tensors, mean: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        from hotloop.kernels.resample import resample

        pixels, boxes = batch["pixels"], batch["boxes"]
        mean, scale = (each.flatten().to(pixels.device) for each in (mean, scale))
        resampled: Tensor = resample(pixels, boxes, mean, scale, self.settings.image_size, dtype)
        return resampled

    @cached_property
    def _resizes_on_device(self) -> bool:
        """Resizing takes a processor as long as decoding; a GPU a hundredth of a step."""
        return self.job.device == "cuda" and find_spec("triton") is not None

    def _middle(self, images_BCHW: Tensor) -> Tensor:
        """The middle of images that have another size than the model sees, resized with antialiasing."""
        from torchvision.transforms.v2 import functional as v2

        height, width = images_BCHW.shape[2:]
        side = max(1, round(min(height, width) * self.settings.center_crop))
        size = self.settings.image_size
        middle = v2.center_crop(images_BCHW, [side, side])
        resized: Tensor = v2.resize(middle, [size, size], antialias=True)
        return resized

    @cached_property
    def _mix(self) -> "v2.Transform":
        """Which draws on the host, so that the compiler does not take it anyway."""
        from torchvision.transforms import v2

        classes, augment = len(self.train_images.classes), self.settings.augment
        mixes: list[v2.Transform] = []
        if augment.mixup:
            mixes.append(v2.MixUp(alpha=augment.mixup, num_classes=classes))
        if augment.cutmix:
            mixes.append(v2.CutMix(alpha=augment.cutmix, num_classes=classes))
        return v2.RandomChoice(mixes)


def _randaugment(magnitude: int) -> "v2.Transform":
    from torchvision.transforms import v2

    return v2.RandAugment(magnitude=magnitude)


def _type_of_images(job: Job, mixed: bool) -> torch.dtype:
    """Of those that go to the model as they are: what its first layer would turn them into."""
    if mixed or job.model.keep_fp32:
        return torch.float32
    types = {"bf16": torch.bfloat16, "float8": torch.bfloat16, "fp16": torch.float16}
    return types.get(job.precision, torch.float32)
