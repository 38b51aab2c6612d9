"""Image classification.

Shape suffixes: B batch, H height, W width, C channels, K classes.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchvision.transforms import v2

from hotloop.core.job import ImagesTask, Job
from hotloop.data.dataset import Dataset
from hotloop.data.images import CenterCrop, ImageFiles, ImageList, RandomCrop, find_images
from hotloop.tasks.models import build_model
from hotloop.tasks.task import Example, Split, Task, Tensors


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
        self._constants: dict[torch.device, tuple[Tensor, Tensor]] = {}

    @cached_property
    def train_images(self) -> ImageList:
        return find_images(self.job.data.train)

    def data(self, split: Split) -> Dataset | None:
        settings = self.settings
        if split == "train":
            augment = settings.augment
            crop = RandomCrop(augment.crop_scale, augment.crop_ratio, augment.flip)
            return ImageFiles(self.train_images, settings.image_size, crop, settings.max_pixels)
        if self.job.data.val is None:
            return None
        images = find_images(self.job.data.val, self.train_images.classes, "data.val")
        return ImageFiles(images, settings.image_size, CenterCrop(settings.center_crop), settings.max_pixels)

    def model(self) -> nn.Module:
        return build_model(self.job.model.name, len(self.train_images.classes), self.job.model.arguments)

    def prepare(self, batch: Tensors, training: bool) -> Tensors:
        images_BCHW = batch["images"].permute(0, 3, 1, 2)
        labels = batch["labels"]
        if training and self._randaugment:
            images_BCHW = self._randaugment(images_BCHW)
        mean, scale = self._normalisation(images_BCHW.device)
        images_BCHW = ((images_BCHW.float() - mean) * scale).contiguous(memory_format=self._layout)
        if training and self._mix and len(labels) > 1:
            images_BCHW, labels = self._mix(images_BCHW, labels)
        return {"images": images_BCHW, "labels": labels}

    def forward(self, model: nn.Module, batch: Tensors) -> Tensor:
        logits_BK: Tensor = model(batch["images"])
        return logits_BK

    def loss(self, outputs: Tensor, batch: Tensors) -> Tensor:
        return functional.cross_entropy(outputs, batch["labels"], label_smoothing=self.settings.label_smoothing)

    def metrics(self, outputs: Tensor, batch: Tensors) -> dict[str, Tensor]:
        return {"accuracy": (outputs.argmax(1) == batch["labels"]).float().mean()}

    def examples(self, outputs: Tensor, batch: Tensors, names: Sequence[str]) -> list[Example]:
        classes = self.train_images.classes
        predictions, labels = outputs.argmax(1).tolist(), batch["labels"].tolist()
        return [
            Example(name, classes[label], classes[prediction], label == prediction, pixels)
            for name, label, prediction, pixels in zip(names, labels, predictions, batch["images"], strict=True)
        ]

    def _normalisation(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._constants:
            mean, std = (torch.tensor(values).view(3, 1, 1) for values in (self.settings.mean, self.settings.std))
            self._constants[device] = ((255 * mean).to(device), (1 / (255 * std)).to(device))
        return self._constants[device]

    @cached_property
    def _randaugment(self) -> v2.Transform | None:
        magnitude = self.settings.augment.randaugment
        return v2.RandAugment(magnitude=magnitude) if magnitude else None

    @cached_property
    def _mix(self) -> v2.Transform | None:
        classes = len(self.train_images.classes)
        augment = self.settings.augment
        mixes: list[v2.Transform] = []
        if augment.mixup:
            mixes.append(v2.MixUp(alpha=augment.mixup, num_classes=classes))
        if augment.cutmix:
            mixes.append(v2.CutMix(alpha=augment.cutmix, num_classes=classes))
        return v2.RandomChoice(mixes) if mixes else None
