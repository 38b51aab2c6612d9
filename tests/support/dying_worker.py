"""Reads ahead from a DataLoader whose worker is killed; prints what arrives."""

import os
import signal

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from hotloop.train.prefetch import Reader


class Deadly(Dataset[Tensor]):
    """Kills the worker that reads the first sample: of later ones the batches before, which torch passes by a file
    descriptor that the worker holds, may be lost with it.
    """

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        if index == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor(index)


class Box:
    def pack(self, item: Tensor) -> None:
        self.item = item


def main() -> None:
    reader = Reader(iter(DataLoader(Deadly(), batch_size=1, num_workers=1)), [Box(), Box()])
    try:
        while box := reader.next(wait=True):
            reader.give_back(box)
    except RuntimeError as error:
        print(error, flush=True)
        os._exit(0)  # torch's handler raises again at every other signal


if __name__ == "__main__":
    main()
