"""What a data set is: samples by number, each a few arrays of fixed shape."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from hotloop.core.errors import DamagedSample, InputError
from hotloop.data.random import sample_generator

Sample = Mapping[str, np.ndarray]


class Dataset(ABC):
    """Samples by number.

    Its objects travel to worker processes by pickle: keep what is small (paths, not pixels), open files in `sample`.

    Attributes:
        room: for arrays whose shape differs between samples, by name, how many elements one has at most. In a batch
            each has so many in one dimension, its own first; what lies behind them is anything.
    """

    room: Mapping[str, int] = MappingProxyType({})

    @abstractmethod
    def __len__(self) -> int:
        """How many samples there are."""

    @abstractmethod
    def sample(self, index: int, random: np.random.Generator) -> Sample:
        """Sample `index` as named arrays or numbers, of the same shapes and dtypes for every sample.

        Args:
            index: 0 to `len(self)` - 1.
            random: the sample's own random numbers in this epoch; draw augmentation from it and from nothing else.

        Raises:
            DamagedSample: the sample cannot be read; another one takes its place.
        """

    def encoded(self, index: int, random: np.random.Generator) -> Sample:
        """As `sample`, but a decoder of the device may have to finish it; for those who offer that."""
        return self.sample(index, random)

    def in_worker(self) -> "Dataset":
        """What a worker process reads from, asked for once in each: for those who hold there what cannot travel."""
        return self

    def name(self, index: int) -> str:
        """What to call sample `index` in messages: its file, if it has one."""
        return f"sample {index}"

    @abstractmethod
    def fingerprint(self) -> str:
        """A text that differs between different data; a run resumes only with the same."""


@dataclass(frozen=True)
class Damage:
    """One damaged sample that was met."""

    name: str
    reason: str


@dataclass(frozen=True)
class Filled:
    """A sample that was read, perhaps instead of damaged ones."""

    index: int
    sample: Sample
    damages: tuple[Damage, ...]


_ATTEMPTS = 100
"""Samples that are drawn before data counts as damaged altogether."""


def attempts_for(on_damaged: str) -> int:
    """How many samples are drawn where one is damaged that is to be replaced, dropped or raised."""
    return _ATTEMPTS if on_damaged == "replace" else 1


def read_sample(
    dataset: Dataset, seed: int, epoch: int, index: int, attempts: int = _ATTEMPTS, encoded: bool = False
) -> Filled:
    """Sample `index`, or the one that takes its place if it is damaged: always the same one.

    Args:
        encoded: whether a decoder of the device may be left to finish it.

    Raises:
        DamagedSample: as many samples in a row as there are attempts were damaged.
    """
    damages: list[Damage] = []
    read = dataset.encoded if encoded else dataset.sample
    for attempt in range(attempts):
        random = sample_generator(seed, epoch, index, attempt)
        try:
            return Filled(index, read(index, random), tuple(damages))
        except DamagedSample as damaged:
            damages.append(Damage(damaged.name, damaged.reason))
            index = int(random.integers(len(dataset)))
    others = f"; so were all {attempts - 1} drawn in its place" if attempts > 1 else ""
    raise DamagedSample(damages[0].name, f"{damages[0].reason}{others}")


@dataclass(frozen=True)
class Field:
    """Shape (without the batch) and dtype of one array of a sample."""

    shape: tuple[int, ...]
    dtype: np.dtype


def sample_fields(dataset: Dataset, seed: int) -> dict[str, Field]:
    """Shapes and dtypes of the data set's samples, from the first that can be read.

    Raises:
        InputError: the data set is empty, none of its samples can be read, or they hold nothing, texts or objects.
    """
    if len(dataset) == 0:
        raise InputError("the data set has 0 samples", "there is nothing to train on", "name other data")
    try:
        sample = read_sample(dataset, seed, 0, 0).sample
    except DamagedSample as damaged:
        fix = "name data that can be read: --set data.train=FOLDER, or data.val=FOLDER"
        raise InputError(damaged.what, damaged.cause, fix) from None
    arrays = {key: np.asarray(value) for key, value in sample.items()}
    for key, array in arrays.items():
        if array.dtype.kind not in "biufc":
            raise InputError(
                f"{key} of {dataset.name(0)} is of type {array.dtype}",
                "samples are arrays or numbers of one fixed type; texts and objects are not",
                f"return a number for {key}, an index into a list of texts for example",
            )
    if not any(array.size for array in arrays.values()):
        shapes = ", ".join(f"{key} of shape {array.shape}" for key, array in arrays.items())
        fix = "return at least one array that is not empty"
        raise InputError(f"{dataset.name(0)} holds no number", f"it has {shapes or 'no array'}", fix)
    room = {key: (most,) for key, most in dataset.room.items()}
    return {key: Field(room.get(key, array.shape), array.dtype) for key, array in arrays.items()}
