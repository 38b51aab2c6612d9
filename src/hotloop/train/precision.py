"""Number formats: what the card has, what "auto" takes, which layers stay in fp32."""

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from hotloop.core.errors import InputError
from hotloop.train.blocks import tensors_as_float, wrap_forward

_NEEDS = {"tf32": (8, 0), "bf16": (8, 0), "float8": (8, 9)}
"""Compute capability from which the matrix units have a format.
Source: https://docs.nvidia.com/cuda/cuda-c-programming-guide/#features-and-technical-specifications"""


def choose_precision(asked: str, device: str) -> tuple[str, str]:
    """The precision to train in, and why.

    Raises:
        InputError: it is asked for, and the card or a package for it is not there.
    """
    if device == "cpu":
        if asked == "float8":
            raise InputError('precision = "float8" on a CPU', "only GPUs have it", "--set precision=fp32")
        return ("fp32", "fp32 is the CPU's own format") if asked == "auto" else (asked, "asked for")
    capability, name = torch.cuda.get_device_capability(), torch.cuda.get_device_name()
    version = ".".join(str(part) for part in capability)
    if asked == "auto":
        chosen = "bf16" if capability >= _NEEDS["bf16"] else "fp16"
        has = "has" if chosen == "bf16" else "has no bf16 but"
        return chosen, f"{name} (compute capability {version}) {has} {chosen} matrix units"
    if capability < _NEEDS.get(asked, (0, 0)):
        needed = ".".join(str(part) for part in _NEEDS[asked])
        raise InputError(
            f'precision = "{asked}" on {name}',
            f"{asked} needs compute capability {needed}; this card has {version}",
            "--set precision=auto",
        )
    if asked == "float8" and find_spec("torchao") is None:
        raise InputError(
            'precision = "float8" needs torchao', "it is not installed here", 'pip install "hotloop[float8]"'
        )
    return asked, "asked for"


def use_float8(model: nn.Module) -> int:
    """Let the model's linear layers multiply in float8, scaled by tensor. The number of layers.

    A layer whose sizes are no multiples of 16 stays as it is, as the matrix units need that; so does the last one,
    whose rounding the loss would show.

    Raises:
        InputError: there is none.
    """
    from torchao.float8 import convert_to_float8_training

    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    last = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)][-1:]

    def suits(module: nn.Module, name: str) -> bool:
        sizes = (getattr(module, "in_features", 1), getattr(module, "out_features", 1))
        return name in linear and name not in last and all(size % 16 == 0 for size in sizes)

    suited = [name for name, module in model.named_modules() if suits(module, name)]
    if not suited:
        raise InputError(
            'precision = "float8": the model has no linear layer for it',
            f"of {len(linear)} linear layers none but the last has sizes that are multiples of 16",
            "--set precision=bf16",
        )
    convert_to_float8_training(model, module_filter_fn=suits)
    return len(suited)


def keep_in_fp32(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Let layers compute in fp32 whatever the step's precision; their names.

    Args:
        patterns: names of layers ("head", "blocks.*.norm1") or of their classes ("LayerNorm"), with * and ?.

    Raises:
        InputError: a pattern fits no layer.
    """
    kept: dict[str, nn.Module] = {}
    for pattern in patterns:
        fitting = {
            name: module
            for name, module in model.named_modules()
            if name and (fnmatchcase(name, pattern) or fnmatchcase(type(module).__name__, pattern))
        }
        if not fitting:
            names = ", ".join([name for name, _ in model.named_modules() if name][:6])
            raise InputError(
                f'model.keep_fp32: "{pattern}" fits no layer',
                f"neither a name ({names}, ...) nor a class",
                "--set model.keep_fp32=[]",
            )
        kept |= fitting
    device = next(model.parameters()).device.type

    def around(forward: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        with torch.autocast(device, enabled=False):
            floats = {name: tensors_as_float(value) for name, value in named.items()}
            return forward(*(tensors_as_float(value) for value in arguments), **floats)

    for module in kept.values():
        wrap_forward(module, around)
    return sorted(kept)
