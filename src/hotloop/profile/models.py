"""What models do in a step, done otherwise or left out while its time is taken."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hotloop.attach.patches import Patches


class Models:
    """The script's models.

    Attributes:
        objection: why a condition did not hold in all steps; empty if it did.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.objection = ""

    @property
    def distributed(self) -> list[Any]:
        """Those whose gradients ranks exchange."""
        return self._all(self._torch.nn.parallel.DistributedDataParallel)

    @property
    def on_several_gpus(self) -> list[Any]:
        """Those that one process copies to several GPUs in each step."""
        return [model for model in self._all(self._torch.nn.DataParallel) if len(model.device_ids) > 1]

    def _all(self, kind: type) -> list[Any]:
        return [found for found in gc.get_objects() if type(found) is kind]

    @contextmanager
    def without_communication(self) -> Iterator[None]:
        """Gradients are not exchanged: what that costs is more than what of it shows, as ranks that share processors
        or a bus compute more slowly meanwhile. Each rank then trains a model of its own.
        """
        models = self.distributed
        for model in models:
            model.require_backward_grad_sync = False
        try:
            yield
        finally:
            for model in models:
                model.require_backward_grad_sync = True

    @contextmanager
    def first_part_alone(self) -> Iterator[None]:
        """DataParallel computes on its first GPU what is that one's, and nothing else: as a process for each would.
        The others' results are taken to be the same.
        """
        torch, each = self._torch, self._torch.utils._pytree.tree_map

        def patched(original: Callable[..., Any]) -> Callable[..., Any]:
            def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
                number, sizes = len(model.device_ids), []
                if number < 2:
                    return original(model, *args, **kwargs)

                def part(value: Any) -> Any:
                    if not isinstance(value, torch.Tensor) or not value.dim():
                        return value
                    sizes.append(len(value))
                    return value.chunk(number)[0].to(model.src_device_obj)

                def whole(value: Any) -> Any:
                    if not isinstance(value, torch.Tensor):
                        return value
                    if not value.dim():
                        return value.expand(number)
                    return torch.cat([value] * number)[: max(sizes, default=0)]

                inputs, named = each(part, (args, kwargs))
                return each(whole, model.module(*inputs, **named))

            return forward

        patches = Patches()
        patches.replace(torch.nn.DataParallel, "forward", patched)
        try:
            yield
        finally:
            patches.undo()

    @property
    def in_float32(self) -> list[Any]:
        """Outermost modules with weights of no other type on a GPU that computes in bfloat16; none if one is compiled,
        which would be compiled anew.
        """
        torch = self._torch
        made = [found for found in gc.get_objects() if issubclass(type(found), torch.nn.Module)]
        modules = [found for found in made if "_modules" in vars(found)]  # others have not been initialised
        inner = {id(child) for module in modules for child in module.children()}
        outermost = [module for module in modules if id(module) not in inner]
        if any(getattr(module, "_orig_mod", None) or module._compiled_call_impl for module in modules):
            return []
        return [module for module in outermost if self._is_float32(module)]

    def _is_float32(self, module: Any) -> bool:
        if isinstance(module, self._torch.jit.ScriptModule):  # compiled with the types it has
            return False
        weights = [weight for weight in module.parameters() if weight.is_floating_point()]
        return bool(weights) and all(weight.dtype == self._torch.float32 and weight.is_cuda for weight in weights)

    @contextmanager
    def under_autocast(self) -> Iterator[None]:
        """The same modules under autocast to bfloat16, their results in float32 again. What objects to it, or is under
        autocast already, computes as it would.
        """
        torch, each = self._torch, self._torch.utils._pytree.tree_map

        def exact(value: Any) -> Any:
            low = isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16
            return value.float() if low else value

        def patched(original: Callable[..., Any]) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                if torch.is_autocast_enabled("cuda"):
                    self.objection = "the script has an autocast of its own"
                if self.objection:
                    return original(*args, **kwargs)
                try:
                    with torch.autocast("cuda", torch.bfloat16):
                        return each(exact, original(*args, **kwargs))
                except Exception as error:
                    self.objection = f"{type(error).__name__}: {error}".partition("\n")[0]
                return original(*args, **kwargs)

            return forward

        self.objection, patches = "", Patches()
        for module in self.in_float32:
            patches.replace(module, "forward", patched)
        try:
            yield
        finally:
            patches.undo()
