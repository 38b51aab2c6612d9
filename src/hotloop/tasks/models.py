"""Models by name: torchvision's, timm's, or the user's own."""

import inspect
from difflib import get_close_matches
from typing import Any

from torch import nn

from hotloop.core.errors import InputError
from hotloop.core.objects import load_object


def build_model(name: str, classes: int, arguments: dict[str, Any]) -> nn.Module:
    """A new model with `classes` outputs, weights drawn from torch's random numbers.

    Args:
        name: looked for in torchvision, then in timm; or "module:callable", given `num_classes` if it takes it.
        arguments: other keyword arguments of the constructor; `num_classes` among them wins.

    Raises:
        InputError: there is no model of that name, or it does not take those arguments.
    """
    if ":" in name:
        build = load_object(name, "model.name")
        takes_classes = "num_classes" in inspect.signature(build).parameters
        arguments = {"num_classes": classes, **arguments} if takes_classes else arguments
    else:
        build = _registered(name)
        arguments = {"num_classes": classes, **arguments}
    try:
        model = build(**arguments)
    except TypeError as error:
        raise InputError(
            f"model.arguments = {arguments} do not fit {name}", str(error), "--set model.arguments={}"
        ) from error
    if not isinstance(model, nn.Module):
        raise InputError(
            f'model.name = "{name}" gave a {type(model).__name__}', "a model is a torch.nn.Module", "return one"
        )
    return model


def _registered(name: str) -> Any:
    from torchvision import models

    if name in models.list_models(module=models):
        return models.get_model_builder(name)
    import timm

    if timm.is_model(name):
        return lambda **arguments: timm.create_model(name, **arguments)
    near = get_close_matches(name, [*models.list_models(module=models), *timm.list_models()], n=1, cutoff=0.5)
    raise InputError(
        f'unknown model "{name}"',
        f"neither torchvision nor timm has it{f'; the nearest name is {near[0]}' if near else ''}",
        f'--set model.name="{near[0] if near else "resnet18"}", or "module:callable" for your own',
    )
