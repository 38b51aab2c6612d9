"""Data sets that are arrays in memory: nothing to decode, no workers; on a GPU they are kept there."""

import hashlib
from collections.abc import Mapping

import numpy as np

from hotloop.core.errors import InputError
from hotloop.data.dataset import Dataset, Sample


class ArrayDataset(Dataset):
    """Samples that are the rows of arrays in host memory.

    Batches are gathered from them by number: on a GPU with room for them the arrays are copied there once, and a batch
    costs one kernel an array.

    Args:
        arrays: by name, each (samples, ...), of numbers.

    Raises:
        InputError: there is none, they differ in their number of rows, or one holds texts or objects.

    Example:
        ```python
        hotloop.ArrayDataset({"inputs": x, "targets": y})
        ```
    """

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.arrays = {name: _native(array) for name, array in arrays.items()}
        rows = {name: len(array) if array.ndim else 0 for name, array in self.arrays.items()}
        if len(set(rows.values())) != 1:
            found = ", ".join(f"{name} {count}" for name, count in rows.items()) or "none"
            raise InputError(
                f"arrays of different lengths: {found}", "row i of each is sample i", "cut them to one length"
            )
        for name, array in self.arrays.items():
            if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
                fix = f"make {name} numbers: class numbers for texts, for example"
                raise InputError(f"the array {name} is of type {array.dtype}", "a batch holds numbers", fix)

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    @property
    def size_bytes(self) -> int:
        """Memory that the arrays take."""
        return sum(array.nbytes for array in self.arrays.values())

    def sample(self, index: int, random: np.random.Generator) -> Sample:
        return {name: np.asarray(array[index]) for name, array in self.arrays.items()}

    def fingerprint(self) -> str:
        """Hash over names, shapes, types and bytes. About 1 s a GB."""
        digest = hashlib.sha256()
        for name, array in sorted(self.arrays.items()):
            digest.update(f"{name} {array.shape} {array.dtype}".encode())
            digest.update(array.data.cast("B") if array.size else b"")
        return digest.hexdigest()


def _native(array: np.ndarray) -> np.ndarray:
    """Contiguous, in the byte order of this machine."""
    return np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))
