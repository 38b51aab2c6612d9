"""Text as token numbers in one file, memory-mapped, cut into windows."""

import hashlib
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from hotloop.core.errors import DamagedSample, InputError
from hotloop.data.dataset import Dataset, Sample


@dataclass(frozen=True)
class TokenWindows(Dataset):
    """Windows of a token file, one after another.

    A sample is `tokens`, int32 (context + 1,): what the model sees, and the same moved on by one. Windows share their
    edge token, so that each token but the first is predicted once an epoch. A rest shorter than a window is left out.

    Attributes:
        path: a `.npy` of uint16 or uint32 (N,), or their bytes alone in a `.bin` (uint16, up to 65,536 tokens).
        context: tokens the model sees.
        vocabulary: numbers that tokens may have; a larger one is an error.
    """

    path: str
    context: int
    vocabulary: int

    @cached_property
    def tokens(self) -> np.ndarray:
        """The whole file, memory-mapped.

        Raises:
            InputError: it cannot be read or holds something else.
        """
        fix = "numpy.save(FILE, tokens): uint16 or uint32 (N,)"
        try:
            if Path(self.path).suffix == ".npy":
                tokens: np.ndarray = np.load(self.path, mmap_mode="r", allow_pickle=False)
            else:
                tokens = np.memmap(self.path, np.uint16 if self.vocabulary <= 2**16 else np.uint32, "r")
        except (OSError, ValueError, EOFError) as error:
            raise InputError(f"cannot read tokens from {self.path}", str(error), fix) from None
        if tokens.dtype not in (np.uint16, np.uint32) or tokens.ndim != 1:
            raise InputError(
                f"{self.path} holds {tokens.dtype} {tokens.shape}", "tokens are uint16 or uint32 (N,)", fix
            )
        if len(tokens) <= self.context:
            what = f"{self.path} holds {len(tokens):,} tokens, a window takes {self.context + 1:,}"
            raise InputError(what, "not one window could be filled", f"--set task.context={max(1, len(tokens) // 2)}")
        return tokens

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def sample(self, index: int, random: np.random.Generator) -> Sample:
        start = index * self.context
        window = self.tokens[start : start + self.context + 1]
        if window.max() >= self.vocabulary:
            raise DamagedSample(
                self.name(index), f"token {window.max()} is not below task.vocabulary = {self.vocabulary}"
            )
        return {"tokens": window.astype(np.int32)}

    def name(self, index: int) -> str:
        return f"tokens {index * self.context:,} to {(index + 1) * self.context:,} of {self.path}"

    def fingerprint(self) -> str:
        """Hash over size, context, and a thousand windows' tokens, evenly spread: a file may have terabytes."""
        digest = hashlib.sha256(f"{os.path.getsize(self.path)} {self.context} {self.vocabulary}".encode())
        for index in np.linspace(0, len(self) - 1, min(1000, len(self)), dtype=np.int64):
            digest.update(self.tokens[index * self.context : (index + 1) * self.context].tobytes())
        return digest.hexdigest()

    def __getstate__(self) -> dict[str, object]:
        return {"path": self.path, "context": self.context, "vocabulary": self.vocabulary}
