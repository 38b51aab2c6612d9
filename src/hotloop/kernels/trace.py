"""A model's forward pass as a graph, where the graph says all that the pass does."""

import inspect
import operator
from typing import Any

import torch
from torch import fx, nn

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_AUGMENTED = ("iadd", "isub", "imul", "itruediv", "setitem")


def trace(model: nn.Module) -> fx.GraphModule | None:
    """Trace a model in training.

    torch.fx writes down calls, and nothing of what surrounds them. A model is left alone (None) where that would change
    it: with hooks, layers in evaluation, arguments that may be left out, decisions by data, passages without gradients
    or with another precision, recomputation, values written in place for others to read, attributes set in the pass.
    """
    modules = list(model.modules())
    hooked = any(getattr(module, name) for module in modules for name in _HOOKS)
    if hooked or not all(module.training for module in modules) or not _takes_what_it_needs(model):
        return None
    before = [dict(vars(module)) for module in modules]
    try:
        traced = fx.GraphModule(model, _Tracer().trace(model))
    except Exception:  # it decides by data, or _Tracer saw what it cannot write down
        traced = None
    changed = [_restore(module, attributes) for module, attributes in zip(modules, before, strict=True)]
    return None if traced is None or any(changed) or not _says_all(traced) else traced


def _takes_what_it_needs(model: nn.Module) -> bool:
    """Whether forward has positional arguments only, all of them necessary."""
    parameters = inspect.signature(model.forward).parameters.values()
    return all(
        parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.default is parameter.empty
        for parameter in parameters
    )


def _restore(module: nn.Module, attributes: dict[str, Any]) -> bool:
    """Put back what the pass has set; whether it has."""
    now = vars(module)
    if now.keys() == attributes.keys() and all(now[key] is attributes[key] for key in now):
        return False
    now.clear()
    now.update(attributes)
    return True


class _Value(fx.Proxy):
    """Writes `x += y` down as what it is; fx makes `x = x + y` of it."""

    def _augment(self, operation: Any, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", operation, (self, other), {})

    def __iadd__(self, other: Any) -> Any:
        return self._augment(operator.iadd, other)

    def __isub__(self, other: Any) -> Any:
        return self._augment(operator.isub, other)

    def __imul__(self, other: Any) -> Any:
        return self._augment(operator.imul, other)

    def __itruediv__(self, other: Any) -> Any:
        return self._augment(operator.itruediv, other)


class _Tracer(fx.Tracer):
    """Raises where an operation's surroundings count."""

    def __init__(self) -> None:
        super().__init__()
        self._surroundings = _surroundings()

    def create_node(self, *arguments: Any, **named: Any) -> fx.Node:
        if _surroundings() != self._surroundings:
            raise ValueError("a graph does not hold contexts")
        return super().create_node(*arguments, **named)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Value(node, self)


def _surroundings() -> tuple[Any, ...]:
    """Contexts that change what an operation does: gradients, precision, what is saved for backward."""
    precisions = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cuda", "cpu")]
    return torch.is_grad_enabled(), precisions, torch._C._autograd._top_saved_tensors_default_hooks(True)


def _says_all(traced: fx.GraphModule) -> bool:
    """Whether nothing is lost that happens in place, and no number was drawn while tracing."""
    modules = dict(traced.named_modules())
    for node in traced.graph.nodes:
        if node.op == "get_attr" and str(node.target).startswith("_tensor_constant"):
            return False
        if _in_place(node, modules) and (not node.users or len(node.args[0].users) > 1):
            return False
    return True


def _in_place(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    if node.op == "call_method":
        return str(node.target).endswith("_")
    if node.op == "call_module":
        return bool(getattr(modules[str(node.target)], "inplace", False))
    name = getattr(node.target, "__name__", "")
    return node.op == "call_function" and (name in _AUGMENTED or name.endswith("_") or bool(node.kwargs.get("inplace")))
