"""Batches of one length: a short one is lengthened by samples that count for nothing."""

from collections.abc import Mapping

import torch
from torch import Tensor

from hotloop.core.errors import HotloopError
from hotloop.train.pieces import batch_size

VALID = "valid"
"""Name in a padded batch of which samples are real, bool (B,)."""


def pad(batch: Mapping[str, Tensor], size: int) -> dict[str, Tensor]:
    """A batch of `size` samples, so that one graph and one compilation serve all: zeros after its own, and `VALID`.

    Tensors of another length than the batch, class weights say, stay as they are.

    Raises:
        HotloopError: the batch is longer, no dict of tensors, or has a `VALID` of its own.
    """
    if not isinstance(batch, Mapping) or not all(isinstance(tensor, Tensor) for tensor in batch.values()):
        kind = "dict with other values" if isinstance(batch, Mapping) else type(batch).__name__
        raise HotloopError(f"a {kind} cannot be padded", "pad_to lengthens dicts of tensors", "a dict as the batch")
    if VALID in batch:
        raise HotloopError(
            f'a batch with a tensor "{VALID}" cannot be padded', "the mask of padding has that name", "another name"
        )
    count = batch_size(batch)
    if not 0 < count <= size:
        raise HotloopError(
            f"a batch of {count} samples cannot be padded to {size}",
            "pad_to is the size of the longest batch",
            f"StepSettings(pad_to={max(1, count)})",
        )
    longer = {name: _longer(tensor, count, size) for name, tensor in batch.items()}
    device = next(iter(batch.values())).device
    return {**longer, VALID: torch.arange(size, device=device) < count}


def _longer(tensor: Tensor, count: int, size: int) -> Tensor:
    if size == count or not tensor.ndim or len(tensor) != count:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(size - count, *tensor.shape[1:])])
