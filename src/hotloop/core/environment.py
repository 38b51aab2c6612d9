"""Environment variables, for a while."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

ALLOCATOR, _ALLOCATOR_BEFORE = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
"""The allocator's settings, and the older name for those of a GPU's."""
TRAINING = {
    # By default OpenMP's threads spin at the end of each loop until the last is done, which takes the processor from
    # whatever else runs (bench/contention.py).
    "GOMP_SPINCOUNT": "10000",
    # torch warns of each lost connection with thirty lines of C++ frames; hotloop says it in one.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    # Queues to the GPU. The JPEG engines have a stream for each image; of trainings that used them with the default, 8,
    # 5 in 20 were slow from beginning to end, with 32 none of 4 (bench/jpeg_to_gpu.py, 8 processors, H200).
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    # torch's allocator holds what is freed in pieces that larger tensors do not fit in. ResNet-50, batches of 460,
    # compiled and captured: of 18.5 GiB in use it held 24.0 GiB, and 18.9 GiB so (H200, torch 2.11).
    ALLOCATOR: "expandable_segments:True",
}
"""Of a training where nobody has set them otherwise: read once, when torch is imported or the GPU is first used."""


def for_training(given: Mapping[str, str]) -> dict[str, str]:
    """An environment, and what a training should have besides."""
    ours = TRAINING
    if has_allocator_settings(given):
        ours = {name: value for name, value in TRAINING.items() if name != ALLOCATOR}
    return {**ours, **given}


def has_allocator_settings(given: Mapping[str, str]) -> bool:
    """Whether somebody has said how torch's allocator is to be."""
    return ALLOCATOR in given or _ALLOCATOR_BEFORE in given


@contextmanager
def environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Let these variables be so within; None: not set. Afterwards they are as they were."""
    before = {name: os.environ.get(name) for name in values}
    _set(values)
    try:
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
