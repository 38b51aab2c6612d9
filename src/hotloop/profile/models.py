"""What models do in a step, done otherwise or left out while its time is taken."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

from hotloop.attach.patches import replaced


class Models:
    """The script's models.

    Attributes:
        objection: why a condition did not hold in all steps; empty if it did.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.objection = self._failed = ""
        self._within = False

    @property
    def distributed(self) -> list[Any]:
        """Those whose gradients ranks exchange."""
        return self._all(self._torch.nn.parallel.DistributedDataParallel)

    @property
    def on_several_gpus(self) -> list[Any]:
        """Those that one process copies to several GPUs in each step, the samples of a batch side by side."""
        found = self._all(self._torch.nn.DataParallel)
        return [model for model in found if len(model.device_ids) > 1 and not model.dim]

    def _all(self, kind: type) -> list[Any]:
        return [found for found in gc.get_objects() if type(found) is kind]

    @contextmanager
    def without_communication(self) -> Iterator[None]:
        """Gradients are not exchanged: what that costs is more than what of it shows, as ranks that share processors
        or a bus compute more slowly meanwhile. Each rank then trains a model of its own.
        """
        models = self.distributed
        known = {id(model) for model in models}

        def patched(original: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(original)
            def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
                if id(model) in known:  # scripts that accumulate say for each batch whether to exchange
                    model.require_backward_grad_sync = False
                return original(model, *args, **kwargs)

            return forward

        with replaced([(self._torch.nn.parallel.DistributedDataParallel, "forward", patched)]):
            yield
        for model in models:
            model.require_backward_grad_sync = True

    @contextmanager
    def first_part_alone(self) -> Iterator[None]:
        """DataParallel computes on its first GPU what is that one's, and nothing else: as a process for each would.
        The others' results are taken to be the same.
        """
        torch, each = self._torch, self._torch.utils._pytree.tree_map
        parallel = {id(model) for model in self.on_several_gpus}

        def patched(original: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(original)
            def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
                number, cuts = len(model.device_ids), []
                if id(model) not in parallel:
                    return original(model, *args, **kwargs)

                def part(value: Any) -> Any:
                    if not isinstance(value, torch.Tensor) or not value.dim():
                        return value
                    first = value.chunk(number)[0]
                    cuts.append((len(first), len(value)))
                    return first.to(model.src_device_obj)

                def whole(value: Any) -> Any:
                    if not isinstance(value, torch.Tensor):
                        return value
                    if not value.dim():
                        return value.expand(number)
                    first, rows = cuts[0] if cuts else (1, number)
                    return torch.cat([value] * number)[: len(value) * rows // max(1, first)]

                inputs, named = each(part, (args, kwargs))
                return each(whole, model.module(*inputs, **named))

            return forward

        with replaced([(self._torch.nn.DataParallel, "forward", patched)]):
            yield

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

        Their classes' forward is replaced, so that models can be copied and saved whole meanwhile.
        """
        modules = self.in_float32
        known, self.objection = {id(module) for module in modules}, "the script calls no model as a whole"
        own = [module for module in modules if "forward" in vars(module)]
        kinds = {type(module) for module in modules if "forward" not in vars(module)}
        of_classes = ((kind, "forward", partial(self._autocast, known)) for kind in kinds)
        of_modules = ((module, "forward", partial(self._autocast, None)) for module in own)
        with replaced([*of_classes, *of_modules]):
            yield

    def _autocast(self, known: set[int] | None, original: Callable[..., Any]) -> Callable[..., Any]:
        """A forward for the modules of these numbers, its first argument; None: it is a module's own."""
        torch, each = self._torch, self._torch.utils._pytree.tree_map

        def exact(value: Any) -> Any:
            low = isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16
            return value.float() if low else value

        @wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._failed or self._within or (known is not None and id(args[0]) not in known):
                return original(*args, **kwargs)
            if torch.is_autocast_enabled("cuda"):
                self._failed = self.objection = "the script has an autocast of its own"
                return original(*args, **kwargs)
            self._within = True
            try:
                with torch.autocast("cuda", torch.bfloat16):
                    found = each(exact, original(*args, **kwargs))
                self.objection = ""
                return found
            except Exception as error:
                self._failed = self.objection = f"{type(error).__name__}: {error}".partition("\n")[0]
            finally:
                self._within = False
            return original(*args, **kwargs)

        return forward
