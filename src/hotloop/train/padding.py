"""Batches of one length: a short one is lengthened by samples that count for nothing."""

from collections.abc import Mapping

import torch
from torch import Tensor

from hotloop.core.errors import HotloopError
from hotloop.train.pieces import batch_size

VALID = "valid"
"""Name in a padded batch of which samples are real, bool (B,)."""


class Padding:
    """Lengthens batches to a fixed size, so that one graph and one compilation serve all of them.

    Args:
        size: samples of every batch that comes back.
    """

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The batch's tensors, zeros after its own samples, and `VALID`.

        Raises:
            HotloopError: the batch is longer, or no dict of tensors.
        """
        if not isinstance(batch, Mapping):
            raise HotloopError(
                f"a {type(batch).__name__} cannot be padded", "pad_to lengthens dicts of tensors", "a dict as the batch"
            )
        count = batch_size(batch)
        if count > self.size:
            raise HotloopError(
                f"a batch of {count} samples cannot be padded to {self.size}",
                "pad_to is the size of the longest batch",
                f"StepSettings(pad_to={count})",
            )
        missing = self.size - count
        longer = {
            name: torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor
            for name, tensor in batch.items()
        }
        device = next(iter(batch.values())).device
        return {**longer, VALID: torch.arange(self.size, device=device) < count}
