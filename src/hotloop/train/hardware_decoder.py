"""The JPEG engines of a card, through nvJPEG (https://docs.nvidia.com/cuda/nvjpeg)."""

import ctypes
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

_PACKAGES = ("nvidia-nvjpeg", "nvidia-nvjpeg-cu12")

# Of nvjpeg.h.
_HARDWARE = 3
_RGB = 5
_INTERPOLATE = 1 << 5
"""Colours are interpolated as libjpeg-turbo does it: of a photograph one value in 40,000 was another, by one level.
Without it the mean difference was 0.9 levels."""

_AT_ONCE = 16
"""Images under way. An H200 has seven engines; with 8, 16 and 32 it decoded 8,200 to 10,100 images/s beside a training,
which took 2 us longer for each."""


def nvjpeg_library() -> Path | None:
    """Where nvJPEG is installed; None if it is not."""
    for package in _PACKAGES:
        try:
            files = distribution(package).files or []
        except PackageNotFoundError:
            continue
        for file in files:
            if file.name.startswith("libnvjpeg.so"):
                return Path(str(file.locate()))
    return None


class HardwareDecoder:
    """Decodes baseline JPEGs; files of other kinds, which nvJPEG would decode elsewhere, are not to be given to it.

    Image by image, each on a stream of its own. nvJPEG's batches go through streams inside of it that wait for whatever
    else the card does: 1,700 to 1,800 images/s beside a training where single images reach 10,000, and nvImageCodec
    builds on them (1,200).

    On Hopper cards an engine writes as soon as it is told to, whatever the stream still has to do before
    (https://github.com/pytorch/vision/issues/9606): the rooms must be free when `decode` is called. And it waits until
    they are full, so that no stream has to.

    Raises:
        OSError: nvJPEG cannot be loaded.
        RuntimeError: it cannot use the card, or the card has no engines.
    """

    def __init__(self, device: torch.device, library: Path) -> None:
        self._nvjpeg = ctypes.CDLL(str(library))
        self._handle = ctypes.c_void_p()
        self._call("nvjpegCreateEx", _HARDWARE, None, None, _INTERPOLATE, ctypes.byref(self._handle))
        self._lanes: list[tuple[ctypes.c_void_p, torch.cuda.Stream]] = []
        for _ in range(_AT_ONCE):
            state = ctypes.c_void_p()
            self._call("nvjpegJpegStateCreate", self._handle, ctypes.byref(state))
            self._lanes.append((state, torch.cuda.Stream(device, priority=-1)))  # type: ignore[no-untyped-call]

    def decode(self, encoded: Sequence[np.ndarray], rooms: Sequence[Tensor]) -> list[bool]:
        """See `DeviceDecoder`."""
        done = []
        for number, (content, room) in enumerate(zip(encoded, rooms, strict=True)):
            data, size = ctypes.c_void_p(content.ctypes.data), ctypes.c_size_t(content.nbytes)
            if self._size(data, size) != tuple(room.shape[:2]):  # it would write beyond the room
                done.append(False)
                continue
            state, stream = self._lanes[number % _AT_ONCE]
            stream.synchronize()  # it decodes one image at a time
            image = _Image()
            image.channel[0], image.pitch[0] = room.data_ptr(), room.stride(0)
            at = ctypes.c_void_p(stream.cuda_stream)
            status = self._nvjpeg.nvjpegDecode(self._handle, state, data, size, _RGB, ctypes.byref(image), at)
            done.append(status == 0)
        for _, stream in self._lanes:
            stream.synchronize()
        return done

    def _size(self, data: ctypes.c_void_p, size: ctypes.c_size_t) -> tuple[int, int] | None:
        """Height and width that the library reads in a file."""
        parts, sampling = ctypes.c_int(), ctypes.c_int()
        widths, heights = (ctypes.c_int * 4)(), (ctypes.c_int * 4)()
        status = self._nvjpeg.nvjpegGetImageInfo(
            self._handle, data, size, ctypes.byref(parts), ctypes.byref(sampling), widths, heights
        )
        return None if status else (heights[0], widths[0])

    def close(self) -> None:
        """Give back what the library holds. After an error of the GPU it may refuse; that error is told elsewhere."""
        for state, _ in self._lanes:
            self._nvjpeg.nvjpegJpegStateDestroy(state)
        self._lanes.clear()
        self._nvjpeg.nvjpegDestroy(self._handle)

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._nvjpeg, name)(*arguments):
            raise RuntimeError(f"{name} failed with status {status}")


class _Image(ctypes.Structure):
    """Where pixels go: planes, and bytes from row to row."""

    _fields_ = (("channel", ctypes.c_void_p * 4), ("pitch", ctypes.c_size_t * 4))
