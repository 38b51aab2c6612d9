"""The JPEG engines of a card, through nvImageCodec (https://docs.nvidia.com/cuda/nvimagecodec/)."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

_OPTIONS = ":fancy_upsampling=1"
"""Colours are interpolated as libjpeg-turbo does it."""
_THREADS = 8
"""That hand images to the engines, of which an H100 has seven."""


def hardware_decoder_is_installed() -> bool:
    """Whether nvImageCodec is there; loading it takes half a second."""
    return find_spec("nvidia") is not None and find_spec("nvidia.nvimgcodec") is not None


class HardwareDecoder:
    """Decodes baseline JPEGs with the engines alone; what they refuse is not decoded.

    On Hopper cards an engine writes as soon as it is told to, whatever the stream still has to do before
    (https://github.com/pytorch/vision/issues/9606): the rooms must be free when `decode` is called. And it waits until
    they are full, so that no stream has to.

    Raises:
        ImportError: nvImageCodec or nvJPEG is not installed.
        RuntimeError: the card has no engines.
    """

    def __init__(self, device: torch.device) -> None:
        os.environ.setdefault("PYNVIMGCODEC_VERBOSITY", "0")  # it prints a line for each image that it refuses
        with _quiet():
            self._codec: Any = import_module("nvidia.nvimgcodec")
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        backends = [self._codec.Backend(self._codec.HW_GPU_ONLY)]
        index = torch.cuda.current_device() if device.index is None else device.index
        with _quiet():
            self._decoder = self._codec.Decoder(
                device_id=index, max_num_cpu_threads=_THREADS, backends=backends, options=_OPTIONS
            )
        # It would turn pixels by the camera's orientation, which decoding on the CPU does not.
        self._params = self._codec.DecodeParams(apply_exif_orientation=False)

    def decode(self, encoded: Sequence[np.ndarray], rooms: Sequence[Tensor]) -> list[bool]:
        """See `DeviceDecoder`."""
        stream = self._stream.cuda_stream
        images = self._codec.as_images(list(rooms), cuda_stream=stream)
        files = [self._codec.CodeStream(each) for each in encoded]
        done = self._decoder.decode(files, images=images, params=self._params, cuda_stream=stream)
        self._stream.synchronize()
        return [image is not None for image in done]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what its libraries say on the terminal of others that are not there, for TIFF and JPEG 2000."""
    kept = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
