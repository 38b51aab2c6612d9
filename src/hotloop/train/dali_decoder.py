"""DALI's JPEG decoder (https://docs.nvidia.com/deeplearning/dali), for those who have it."""

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

_THREADS = 4


def dali_is_installed() -> bool:
    """Whether DALI is there; loading it takes half a second."""
    return find_spec("nvidia") is not None and find_spec("nvidia.dali") is not None


class DaliDecoder:
    """Decodes JPEGs with a pipeline that is one decoder: on a GPU its engines and kernels, on a CPU libjpeg-turbo.

    DALI fails the whole batch for one image that it cannot decode: none of that batch counts as decoded then.

    Args:
        most: images of a call.

    Raises:
        ImportError: DALI is not installed.
        RuntimeError: it cannot use the device.
    """

    def __init__(self, device: torch.device, most: int) -> None:
        self._device = device
        self._most = most
        self._pipeline = self._new_pipeline()

    def decode(self, encoded: Sequence[np.ndarray], rooms: Sequence[Tensor]) -> list[bool]:
        """See `DeviceDecoder`."""
        try:
            (images,) = self._pipeline.run(encoded=list(encoded))
        except RuntimeError:  # the pipeline is of no use afterwards
            self._pipeline = self._new_pipeline()
            return [False] * len(encoded)
        for number, room in enumerate(rooms):
            room.copy_(from_dlpack(images[number]))
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return [True] * len(encoded)

    def close(self) -> None:
        """Give back what the pipeline holds."""
        self._pipeline = None

    def _new_pipeline(self) -> Any:
        dali: Any = import_module("nvidia.dali")
        gpu = self._device.type == "cuda"
        index = torch.cuda.current_device() if gpu and self._device.index is None else self._device.index
        # Fed by each call, it works for that call alone: what lies ahead is the loader's business.
        pipeline = dali.Pipeline(
            batch_size=self._most, num_threads=_THREADS, device_id=index if gpu else None, prefetch_queue_depth=1
        )
        with pipeline:
            encoded = dali.fn.external_source(name="encoded", dtype=dali.types.UINT8, ndim=1)
            images = dali.fn.decoders.image(
                encoded,
                device="mixed" if gpu else "cpu",
                output_type=dali.types.RGB,
                adjust_orientation=False,
                jpeg_fancy_upsampling=True,
                hw_decoder_load=1.0,
            )
            pipeline.set_outputs(images)
        pipeline.build()
        return pipeline
