"""The random crops of torchvision's ImageFolder by our own decoder, which scales while it decodes."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from torchvision import datasets, transforms
from torchvision.transforms import InterpolationMode

from hotloop.core.errors import DamagedSample
from hotloop.data.decode import decode_crop, read_file
from hotloop.data.images import RandomCrop

MAX_PIXELS = 179_000_000
"""Where Pillow refuses too."""


@dataclass(frozen=True)
class Recipe:
    """What a stack of transforms does.

    Attributes:
        mean, std: of a channel; None: values stay between 0 and 1.
    """

    size: int
    crop: RandomCrop
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None


def recipe_of(dataset: Any) -> Recipe | None:
    """What an ImageFolder's transforms do, if they are RandomResizedCrop, RandomHorizontalFlip, ToTensor and Normalize,
    the second and the last of which may be missing; None of anything else.
    """
    if type(dataset) is not datasets.ImageFolder or dataset.loader is not datasets.folder.default_loader:
        return None
    if dataset.target_transform or type(dataset.transform) is not transforms.Compose:
        return None
    stack = list(dataset.transform.transforms)
    if not stack or type(stack[0]) is not transforms.RandomResizedCrop:
        return None
    crop = stack.pop(0)
    flip = stack.pop(0).p if stack and type(stack[0]) is transforms.RandomHorizontalFlip else 0.0
    if not stack or type(stack.pop(0)) is not transforms.ToTensor:
        return None
    last = stack.pop(0) if stack and type(stack[0]) is transforms.Normalize else None
    if stack or len(set(crop.size)) > 1 or crop.interpolation is not InterpolationMode.BILINEAR:
        return None
    mean, std = (tuple(map(float, last.mean)), tuple(map(float, last.std))) if last else (None, None)
    return Recipe(int(crop.size[0]), RandomCrop(tuple(crop.scale), tuple(crop.ratio), float(flip)), mean, std)


class Images(Dataset[tuple[torch.Tensor, int]]):
    """The same samples. Which random numbers are drawn is another matter: as many, of the same distribution.

    Args:
        dataset: an ImageFolder; what cannot be decoded here is left to it.
    """

    def __init__(self, dataset: Any, recipe: Recipe) -> None:
        self._dataset = dataset
        self._recipe = recipe

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self._dataset.samples[index]
        recipe = self._recipe
        random = np.random.default_rng(int(torch.empty((), dtype=torch.int64).random_()))
        try:
            content = read_file(path)
            cut = decode_crop(content, path, recipe.size, lambda h, w: recipe.crop.draw(h, w, random), MAX_PIXELS)
        except DamagedSample:
            sample: tuple[torch.Tensor, int] = self._dataset[index]
            return sample
        pixels = np.ascontiguousarray(cut.resized(recipe.size).transpose(2, 0, 1))
        image = torch.from_numpy(pixels).to(torch.float32).div_(255)
        if recipe.mean:
            image.sub_(torch.tensor(recipe.mean).view(-1, 1, 1)).div_(torch.tensor(recipe.std).view(-1, 1, 1))
        return image, label
