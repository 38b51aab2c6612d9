"""A model on tensors without memory, that behaves as it would on a GPU.

torch can neither differentiate nor cast for a GPU that is not there. So tensors are fakes of a CPU's, and where
autocast and torch's choice of kernels differ between the two, the GPU's is taken.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.overrides import TorchFunctionMode

FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "float8": torch.bfloat16}
_HALVES = (torch.bfloat16, torch.float16)

_FLOAT32_NAMES = (
    "acos asin binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss cosine_similarity "
    "cross_entropy cumprod cumsum dist erfinv exp expm1 group_norm hinge_embedding_loss huber_loss kl_div "
    "l1_loss layer_norm log log10 log1p log2 log_softmax margin_ranking_loss mse_loss multi_margin_loss "
    "multilabel_margin_loss nll_loss norm normalize nuclear_norm pdist poisson_nll_loss pow prod reciprocal "
    "renorm rsqrt sinh smooth_l1_loss soft_margin_loss softmax softmin softplus sum tan triplet_margin_loss"
)
_IN_FLOAT32 = frozenset(_FLOAT32_NAMES.split())
"""What autocast computes in float32 on a GPU, of which it leaves some alone on a CPU.
Source: https://docs.pytorch.org/docs/stable/amp.html#cuda-ops-that-can-autocast-to-float32"""


def fake_weights(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """The same model, its weights and buffers replaced by fakes of a CPU's. Within `faked`.

    Args:
        dtype: that the weights get, but those of batch normalisation; None: their own.
    """
    made: dict[int, nn.Parameter] = {}  # some weights have two names

    def fake(parameter: nn.Parameter, module: nn.Module) -> nn.Parameter:
        if id(parameter) not in made:
            kind = dtype if not isinstance(module, nn.modules.batchnorm._BatchNorm) else None
            empty = torch.empty(parameter.shape, dtype=kind or parameter.dtype, device="cpu")
            made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        return made[id(parameter)]

    for module in model.modules():
        for name, parameter in module._parameters.items():
            module._parameters[name] = None if parameter is None else fake(parameter, module)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
    return model


@contextmanager
def faked() -> Iterator[None]:
    """Tensors that are made within have no memory. An operation that fails raises its error, and nobody logs it too."""
    with FakeTensorMode(allow_non_fake_inputs=True), _unlogged(logging.getLogger("torch._subclasses.fake_tensor")):
        yield


@contextmanager
def _unlogged(logger: logging.Logger) -> Iterator[None]:
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """What autocast casts, and what kernels keep, is as on a GPU. Around forward and backward, which may repeat it."""
    with _OfGpu():
        yield


def cast(precision: str) -> AbstractContextManager[object]:
    """Autocast in a job's precision, within `as_on_gpu`. Around the forward pass."""
    dtype = FORMATS.get(precision)
    return torch.autocast("cpu", dtype=dtype) if dtype else nullcontext()


class _OfGpu(TorchFunctionMode):
    """Takes the place of torch's functions where a CPU has other ones."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if function is functional.scaled_dot_product_attention:
            return _attention(*args, **named)
        if function is functional.dropout:
            return _dropout(*args, **named)
        if getattr(function, "__name__", "") == "rms_norm":
            return _rms_norm(*args, **named)
        casts = torch.is_autocast_enabled("cpu")
        if casts and getattr(function, "__name__", "") in _IN_FLOAT32 and "dtype" not in named:
            with torch.autocast("cpu", enabled=False):
                raised = {name: _raised(value) for name, value in named.items()}
                return function(*[_raised(value) for value in args], **raised)
        return function(*args, **named)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """All kernels for a GPU keep the same for backward as a CPU's: inputs, output, and a number for each query."""
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = (part.to(dtype) for part in (query, key, value))
    if query.ndim != 4:
        plain: Tensor = functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return plain
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output: Tensor = kernel(query, key, value, 0.0, is_causal, attn_mask=attn_mask)[0]
    return output


def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """A GPU has one kernel for it, which reads, writes and keeps what that of layer normalisation does; of mixed types
    it computes operator by operator, too.
    """
    if weight is not None and weight.dtype != input.dtype:
        return functional.rms_norm(input, list(normalized_shape), weight, eps)
    with torch.autocast("cpu", enabled=False):
        return functional.layer_norm(input, list(normalized_shape), weight, None, eps or 1e-5)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """On a GPU a mask of bytes is kept, on a CPU one of the input's own format."""
    return torch.native_dropout(input, p, True)[0] if training and p else input


def _raised(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _HALVES else value
