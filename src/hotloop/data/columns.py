"""Long columns of numbers and texts, which processes share by mapping one file."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np


class Column:
    """An array; one that was read from a file travels to other processes as the file's name.

    Attributes:
        array: not to be written to.
        file: where it lies, a .npy file that does not change; empty if it is in memory alone.
    """

    def __init__(self, array: np.ndarray, file: str = "") -> None:
        self.array = array
        self.file = file

    def write(self, file: Path) -> None:
        np.save(file, self.array, allow_pickle=False)

    @classmethod
    def open(cls, file: str) -> "Column":
        """Map a file that `write` made."""
        return cls(np.load(file, mmap_mode="r", allow_pickle=False), file)

    def __reduce__(self) -> tuple[Any, ...]:
        return (Column.open, (self.file,)) if self.file else (Column, (self.array,))


class Texts(Sequence[str]):
    """Texts side by side, about as large as their UTF-8; file names that are no UTF-8 come back as they were.

    Args:
        characters: bytes of all texts, uint8.
        ends: where each ends, int64.
    """

    def __init__(self, characters: Column, ends: Column) -> None:
        self.characters = characters
        self.ends = ends

    @classmethod
    def of(cls, texts: Iterable[str]) -> "Texts":
        encoded = [text.encode(errors="surrogateescape") for text in texts]
        ends = np.cumsum([len(text) for text in encoded], dtype=np.int64)
        return cls(Column(np.frombuffer(b"".join(encoded), np.uint8)), Column(ends))

    def __len__(self) -> int:
        return len(self.ends.array)

    @overload
    def __getitem__(self, number: int) -> str: ...
    @overload
    def __getitem__(self, number: slice) -> list[str]: ...
    def __getitem__(self, number: int | slice) -> str | list[str]:
        if isinstance(number, slice):
            return [self[one] for one in range(*number.indices(len(self)))]
        if not -len(self) <= number < len(self):
            raise IndexError(f"text {number} of {len(self)}")
        number %= len(self)
        start = int(self.ends.array[number - 1]) if number else 0
        return self.characters.array[start : int(self.ends.array[number])].tobytes().decode(errors="surrogateescape")
