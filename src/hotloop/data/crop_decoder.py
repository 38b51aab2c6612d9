"""The crop of a JPEG alone, by nvImageCodec on processors (https://docs.nvidia.com/cuda/nvimagecodec)."""

import ctypes
import io
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from packaging.version import Version
from PIL import Image

from hotloop.core.environment import environment

_PROCESSORS_ALONE = -99999
"""In place of a GPU's number, of nvimgcodec.h; no GPU is touched."""
_NOWHERE = np.empty(0, np.uint8)
_EXTENSIONS = "NVIMGCODEC_EXTENSIONS_PATH"
_LIBJPEG = "libjpeg_turbo_ext.so*"
_OLDEST = Version("0.9")
"""Before, images lay in page-locked memory, for which each worker would open the GPU."""
_NARROWEST = 8
"""Columns. Of one column, in an image of up to 16, libjpeg-turbo does not interpolate the colours."""


class Region(NamedTuple):
    """Rows and columns of an image; the last ones are not in it."""

    top: int
    left: int
    bottom: int
    right: int


def is_installed() -> bool:
    """Whether nvImageCodec is."""
    return find_spec("nvidia") is not None and find_spec("nvidia.nvimgcodec") is not None


class CropDecoder:
    """Decodes a region of a JPEG, for a process of its own: what is written to standard error meanwhile is its.

    Rows below the region are not looked at, and columns beside it are not computed: a crop of a photograph takes 0.85
    of what all of it takes. The pixels are libjpeg-turbo's, bit for bit. What it does not tell is damage in the middle
    of a file.

    Raises:
        ImportError: nvImageCodec is not installed, or cannot be loaded.
        OSError: there is no standard error, or no temporary folder.
    """

    def __init__(self) -> None:
        self._messages = os.memfd_create("hotloop-decoder-messages")
        weakref.finalize(self, os.close, self._messages)
        self._image: Any = None
        self._memory = _NOWHERE
        with _libjpeg_alone():
            try:
                with self._listening():
                    self._open()
                probe = _any_jpeg(), Region(0, 0, 8, 8)
                self.decode(*probe)  # extensions are loaded for the first image, and may have something to say
                decoded = self.decode(*probe)
            except Exception as error:  # whatever another version than is known has in its place
                raise ImportError(f"nvImageCodec cannot be used: {error}") from error
        if decoded is None:
            raise ImportError("nvImageCodec decodes no JPEG on processors here")

    def _open(self) -> None:
        from nvidia import nvimgcodec

        if Version(nvimgcodec.__version__) < _OLDEST:
            raise ImportError(f"it is {nvimgcodec.__version__}; {_OLDEST} is the oldest that opens no GPU")
        self._codec = nvimgcodec
        backends = [nvimgcodec.Backend(nvimgcodec.BackendKind.CPU_ONLY)]
        self._decoder = nvimgcodec.Decoder(backends=backends, max_num_cpu_threads=1, device_id=_PROCESSORS_ALONE)
        self._as_stored = nvimgcodec.DecodeParams(apply_exif_orientation=False)

    def decode(self, content: bytes, region: Region) -> np.ndarray | None:
        """The region's pixels, uint8 (height, width, 3), red green blue; None if anything is not as it should be.

        They are there until the next call.
        """
        if region.right - region.left < _NARROWEST:
            return None
        with self._listening():
            try:
                part = self._codec.CodeStream(content).get_sub_code_stream(region=self._codec.Region(*region))
                image = self._decoder.decode(part, params=self._as_stored, image=self._image)
            except RuntimeError:
                image = None
        if self._has_complained() or image is None:
            self._image, self._memory = None, _NOWHERE
            return None
        if image is not self._image or image.capacity != len(self._memory):
            self._image, self._memory = image, _memory_of(image)
        return self._memory[: image.size].reshape(image.shape)

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """What libraries write to standard error is kept: libjpeg-turbo tells of damage there, and of no file."""
        usual = os.dup(2)
        os.dup2(self._messages, 2)
        try:
            yield
        finally:
            os.dup2(usual, 2)
            os.close(usual)

    def _has_complained(self) -> bool:
        if complained := os.lseek(self._messages, 0, os.SEEK_CUR) > 0:
            os.ftruncate(self._messages, 0)
            os.lseek(self._messages, 0, os.SEEK_SET)
        return complained


@contextmanager
def _libjpeg_alone() -> Iterator[None]:
    """Of nvImageCodec's extensions the one that is needed: the others would open the GPU, in every process anew."""
    spec = find_spec("nvidia.nvimgcodec")
    folders = spec.submodule_search_locations if spec else None
    with TemporaryDirectory(prefix="hotloop-") as folder:
        for file in (found for each in folders or () for found in Path(each, "extensions").glob(_LIBJPEG)):
            Path(folder, file.name).symlink_to(file)
        with environment({_EXTENSIONS: folder}):
            yield


def _memory_of(image: Any) -> np.ndarray:
    """All that an image may fill. Asked for seldom: each time that nvImageCodec 0.9 tells where, it loses 32 bytes."""
    address = image.__array_interface__["data"][0]
    return np.ctypeslib.as_array((ctypes.c_uint8 * image.capacity).from_address(address))


def _any_jpeg() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "JPEG")
    return file.getvalue()
