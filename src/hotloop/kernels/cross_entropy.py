"""The kernel of `cross_entropy`: a row of logits becomes its gradient in two passes, the second mostly from cache."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _into_gradient(logits, targets, losses, stride, vocabulary, BLOCK: tl.constexpr):
    """One program a row: the running maximum and sum of exponentials, then softmax minus one-hot in place.

    A row whose target is negative becomes 0.
    """
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    target = tl.load(targets + row)
    counted = target >= 0
    at_target = tl.load(start + tl.maximum(target, 0)).to(tl.float32)
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for offset in range(0, vocabulary, BLOCK):
        columns = offset + tl.arange(0, BLOCK)
        values = tl.load(start + columns, mask=columns < vocabulary, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, values)
        kept = tl.where(larger == float("-inf"), 0.0, tl.exp(largest - larger))
        total = total * kept + tl.where(values == float("-inf"), 0.0, tl.exp(values - larger))
        largest = larger
    top = tl.max(largest, 0)
    log_sum = top + tl.log(tl.sum(tl.where(largest == float("-inf"), 0.0, total * tl.exp(largest - top)), 0))
    tl.store(losses + row, tl.where(counted, log_sum - at_target, 0.0))
    for offset in range(0, vocabulary, BLOCK):
        columns = offset + tl.arange(0, BLOCK)
        inside = columns < vocabulary
        values = tl.load(start + columns, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.exp(values - log_sum) - tl.where(columns == target, 1.0, 0.0)
        gradient = tl.where(counted, gradient, 0.0)
        tl.store(start + columns, gradient.to(logits.dtype.element_ty), mask=inside)


def into_gradient_on_gpu(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """As `cross_entropy.into_gradient`; a row's stride is free, its columns are contiguous."""
    losses = torch.empty(len(targets_N), device=logits_NV.device)
    _into_gradient[(len(targets_N),)](
        logits_NV, targets_N, losses, logits_NV.stride(0), logits_NV.shape[1], BLOCK=4096, num_warps=8
    )
    return losses
