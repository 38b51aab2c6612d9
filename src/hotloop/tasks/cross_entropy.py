"""Cross entropy of a linear layer's output that never holds more than it must of it.

Shape suffixes: N tokens, D width, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hotloop.tasks.task import IGNORED

CHUNK_BYTES = 1 << 30
"""Logits held at once. For GPT-2's batch of 32 × 1024 tokens four pieces are as fast as one on an H200, and take 2 GiB
less."""


def linear_cross_entropy(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Tensor:
    """Mean cross entropy of `hidden @ weight.T` against targets, a float32 scalar; negative targets do not count.

    With gradients, the logits are turned into their own gradient in place, so that of four tensors of the size (N, V)
    that the plain way takes, two of them float32, one remains. Its sums are float32 whatever the product's format is,
    but for the gradient of 16-bit weights where no sum goes over several pieces: the product adds up in float32 itself.
    fp16 takes the plain way: unscaled sums over all tokens would overflow it.
    """
    dtype = computed_in(hidden_ND)
    needed = torch.is_grad_enabled() and (hidden_ND.requires_grad or weight_VD.requires_grad)
    if not needed or not len(hidden_ND) or dtype == torch.float16 or hidden_ND.is_meta:
        counted_N = torch.where(targets_N < 0, IGNORED, targets_N)
        return functional.cross_entropy(functional.linear(hidden_ND, weight_VD).float(), counted_N)
    loss: Tensor = _LinearCrossEntropy.apply(hidden_ND, weight_VD, targets_N, dtype)
    return loss


def computed_in(tensor: Tensor) -> torch.dtype:
    """What a linear layer takes a tensor in: autocast's, or its own."""
    device = tensor.device.type
    autocast = not tensor.is_meta and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if autocast else tensor.dtype


class _LinearCrossEntropy(torch.autograd.Function):
    """The gradients are worked out in the forward pass, where the logits are; backward scales them."""

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, dtype: torch.dtype) -> Tensor:
        with torch.autocast(hidden_ND.device.type, enabled=False):
            arguments = hidden_ND.to(dtype), weight_VD.to(dtype), targets_N, _in_one_piece(hidden_ND, weight_VD)
            losses_N, *gradients = torch.ops.hotloop.linear_cross_entropy(*arguments)
        counted = (targets_N >= 0).sum()
        ctx.save_for_backward(*gradients, counted)
        ctx.dtypes = hidden_ND.dtype, weight_VD.dtype
        mean: Tensor = losses_N.sum() / counted
        return mean

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden, weight, counted = ctx.saved_tensors
        scale = outputs[0] / counted.clamp(min=1)  # with none that counts the loss is NaN, as torch's; these are 0
        return (hidden * scale).to(ctx.dtypes[0]), (weight * scale).to(ctx.dtypes[1]), None, None


def _in_one_piece(hidden_ND: Tensor, weight_VD: Tensor) -> bool:
    """Whether all logits are held: they take less than a gradient of 16-bit weights in float32, which pieces need."""
    return weight_VD.dtype == torch.bfloat16 and len(hidden_ND) <= 2 * weight_VD.shape[1]


# One operator, as torch.compile can not see into all of it: addmm with out_dtype has no shape rule in torch 2.11.
@torch.library.custom_op("hotloop::linear_cross_entropy", mutates_args=())
def _with_gradients(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, whole: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Each row's cross entropy, 0 where it does not count, and the gradients of their sum: of hidden, and of the
    weight, in float32 unless it is done as a whole.
    """
    if whole:
        logits_NV = hidden_ND @ weight_VD.T
        return into_gradient(logits_NV, targets_N), logits_NV @ weight_VD, logits_NV.T @ hidden_ND
    rows = max(1, CHUNK_BYTES // (weight_VD.shape[0] * weight_VD.element_size()))
    losses_N = torch.empty(len(hidden_ND), device=hidden_ND.device)
    hidden_gradient = torch.empty_like(hidden_ND)
    weight_gradient: Tensor | None = None
    for start in range(0, len(hidden_ND), rows):
        piece = slice(start, start + rows)
        logits_NV = hidden_ND[piece] @ weight_VD.T
        losses_N[piece] = into_gradient(logits_NV, targets_N[piece])
        torch.mm(logits_NV, weight_VD, out=hidden_gradient[piece])
        weight_gradient = _add_product(weight_gradient, logits_NV.T, hidden_ND[piece])
        del logits_NV  # before the next piece is there beside it
    assert weight_gradient is not None
    return losses_N, hidden_gradient, weight_gradient


@_with_gradients.register_fake
def _(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, whole: bool) -> tuple[Tensor, Tensor, Tensor]:
    losses_N = hidden_ND.new_empty(len(hidden_ND), dtype=torch.float32)
    return losses_N, torch.empty_like(hidden_ND), torch.empty_like(weight_VD, dtype=None if whole else torch.float32)


def _add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Total + a @ b in float32, in place; on a GPU in one kernel."""
    if a.is_cuda and a.dtype != torch.float32:
        if total is None:
            return torch.mm(a, b, out_dtype=torch.float32)
        return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    return a.float() @ b.float() if total is None else total.addmm_(a.float(), b.float())


def into_gradient(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """Turn logits into softmax minus one-hot, in place; each row's cross entropy, float32 (N,).

    Both are 0 where the target is negative.
    """
    if logits_NV.is_cuda:
        from hotloop.kernels.cross_entropy import into_gradient_on_gpu

        return into_gradient_on_gpu(logits_NV, targets_N)
    log_softmax = logits_NV.float().log_softmax(1)
    rows, counted_N = torch.arange(len(targets_N), device=targets_N.device), targets_N >= 0
    at_target = targets_N.clamp(min=0)
    losses = -log_softmax[rows, at_target] * counted_N
    softmax = log_softmax.exp_()
    softmax[rows, at_target] -= 1
    logits_NV.copy_(softmax * counted_N[:, None])
    return losses
