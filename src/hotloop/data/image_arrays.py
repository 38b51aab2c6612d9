"""Small images that fit into memory, all of one size, in one .npz file."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hotloop.core.errors import InputError
from hotloop.data.arrays import ArrayDataset

_FIX = "numpy.savez(FILE, images=images, labels=labels): uint8 (N, H, W, 3), integers (N,)"


@dataclass(frozen=True)
class ImageArrays:
    """Images in memory and the names of their classes.

    Attributes:
        dataset: `images`, uint8 (H, W, 3), and `labels`, int64.
        classes: names, by number.
    """

    dataset: ArrayDataset
    classes: tuple[str, ...]

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the images, pixels."""
        _, height, width, _ = self.dataset.arrays["images"].shape
        return height, width


def load_images(location: str, classes: Sequence[str] | None = None) -> ImageArrays:
    """Read a .npz file of `images`, `labels` and, if the classes have names, `classes`.

    Grey images, (N, H, W) or (N, H, W, 1), get three equal channels.

    Args:
        classes: of the training data; labels beyond them are refused, those of named classes go by their names.

    Raises:
        InputError: the file cannot be read, or does not hold these.
    """
    try:
        with open(location, "rb") as file:  # numpy leaves open what it opened and cannot read
            arrays = np.load(file, allow_pickle=False)
            if isinstance(arrays, np.ndarray):
                raise ValueError("it is one array without a name, as numpy.save writes")
            found = dict(arrays)
    except Exception as error:  # on damaged data numpy, zipfile and zlib raise whatever they trip over
        cause = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"cannot read {location}", cause, _FIX) from None
    if not {"images", "labels"} <= found.keys():
        raise InputError(f"{location} holds {', '.join(found) or 'nothing'}", "it needs images and labels", _FIX)
    images, labels = found["images"], found["labels"]
    if images.ndim == 3:
        images = images[..., None]
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] not in (1, 3):
        raise InputError(
            f"{location}: images are {images.dtype} {images.shape}", "they have to be uint8 (N, H, W, 3)", _FIX
        )
    if labels.dtype.kind not in "iu" or labels.ndim != 1:
        raise InputError(f"{location}: labels are {labels.dtype} {labels.shape}", "they have to be integers (N,)", _FIX)
    named = tuple(str(name) for name in found.get("classes", ()))
    if classes is None:
        classes = named or tuple(str(number) for number in range(int(labels.max(initial=0)) + 1))
    elif named and named != tuple(classes):
        labels = _renumbered(location, labels, named, classes)
    if len(labels) and not 0 <= labels.min() <= labels.max() < len(classes):
        what = f"{location}: labels from {labels.min()} to {labels.max()}"
        raise InputError(what, f"there are {len(classes)} classes, numbered from 0", _FIX)
    images = np.repeat(images, 3, axis=3) if images.shape[3] == 1 else images
    return ImageArrays(ArrayDataset({"images": images, "labels": labels.astype(np.int64)}), tuple(classes))


def _renumbered(location: str, labels: np.ndarray, named: tuple[str, ...], classes: Sequence[str]) -> np.ndarray:
    """Labels by the training data's numbers: what has the same name is the same class."""
    unknown = [name for name in named if name not in classes]
    if unknown or (len(labels) and not 0 <= labels.min() <= labels.max() < len(named)):
        cause = f"the training data has no class {unknown[0]}" if unknown else f"it names {len(named)} classes"
        raise InputError(f"{location}: labels and classes do not fit", cause, _FIX)
    if alike := [name for name in named if max(classes.count(name), named.count(name)) > 1]:
        what = f'{location}: which class "{alike[0]}" is meant cannot be told'
        cause = "several have that name, and the names are not those of the training data in their order"
        raise InputError(what, cause, "give all classes the same order in both, or names of their own")
    numbers: np.ndarray = np.array([classes.index(name) for name in named])
    renumbered: np.ndarray = numbers[labels]
    return renumbered


def is_image_array(location: str) -> bool:
    """Whether a job's data is such a file."""
    return Path(location).suffix == ".npz"
