"""Optimizers by name."""

from difflib import get_close_matches
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hotloop.core.errors import InputError
from hotloop.core.job import OptimizerSection
from hotloop.core.objects import load_object


def make_optimizer(section: OptimizerSection, model: nn.Module) -> Optimizer:
    """The job's optimizer over the model's trainable parameters, fused where torch has it fused.

    Vectors (biases, gains of normalisation) are not decayed unless `decay_vectors` says so: decaying them costs
    accuracy and saves nothing (He et al., "Bag of tricks", 2019).

    Raises:
        InputError: there is no such optimizer, or it does not take those arguments.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trainable if parameter.ndim > 1 or section.decay_vectors]
    vectors = [parameter for parameter in trainable if parameter.ndim <= 1 and not section.decay_vectors]
    groups = [
        {"params": matrices, "weight_decay": section.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    arguments: dict[str, Any] = {"lr": section.learning_rate, **section.arguments}
    kind = _kind(section.name)
    if section.name in ("sgd", "adam", "adamw", "adagrad"):
        arguments.setdefault("fused", True)
    try:
        optimizer: Optimizer = kind([group for group in groups if group["params"]], **arguments)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"optimizer.arguments = {section.arguments} do not fit {section.name}",
            str(error),
            "--set optimizer.arguments={}",
        ) from error
    return optimizer


def _kind(name: str) -> Any:
    if ":" in name:
        return load_object(name, "optimizer.name")
    known = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer
    }
    if name not in known:
        near = get_close_matches(name, known, n=1)
        raise InputError(
            f'unknown optimizer "{name}"',
            f"the nearest name is {near[0]}" if near else f"torch.optim has {', '.join(sorted(known))}",
            f'--set optimizer.name="{near[0] if near else "sgd"}"',
        )
    return known[name]
