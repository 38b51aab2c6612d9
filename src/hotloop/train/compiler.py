"""torch.compile: which part of a model, with what settings, and a cache that outlives the process."""

import os
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from hotloop.core.errors import InputError
from hotloop.core.files import user_cache
from hotloop.train.blocks import repeated_blocks


def keep_compiled_code() -> None:
    """Let compiled kernels stay in the user's cache folder, so that the next run of the same job starts quickly.

    By default they go to /tmp, which a restart or another container empties. Before the first compilation.
    """
    if cache := user_cache():
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "inductor"))


def compile_model(model: nn.Module, how: str, dtype: torch.dtype | None = None) -> bool:
    """Compile a model in place, for fixed shapes.

    Args:
        how: "model": all of it at once, the fastest; "blocks": its repeated blocks, one compilation for all of them.
        dtype: what it computes in on a GPU, if operators of ours may take the place of its batch normalisations.

    Returns:
        Whether operators of ours do.

    Raises:
        InputError: it has no repeated blocks.
    """
    parts = repeated_blocks(model) if how == "blocks" else [model]
    if not parts:
        raise InputError(
            'speed.compile = "blocks": the model has no repeated blocks',
            f"{type(model).__name__} holds no two modules of one class with weights in several layers",
            "--set speed.compile=true",
        )
    _set_up_compiler()
    fused = _fused(model, dtype) if dtype and how == "model" else None
    for part in parts:
        _compile_in_place(part, fused)
    return fused is not None


def _set_up_compiler() -> None:
    import torch._dynamo.config  # not above: loading it takes two seconds

    # The limit is for one piece of code in the whole process, and past it that code silently runs uncompiled. Which
    # shapes are compiled is decided by the step, and said; what is left to count are the models of one process.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 256)
    # An assert would become one on the device, after which no checkpoint can be written.
    torch._dynamo.config.rewrite_assert_with_torch_assert = False


def _fused(model: nn.Module, dtype: torch.dtype) -> Callable[..., Any] | None:
    device = next(model.parameters()).device
    if find_spec("triton") is None or torch.cuda.get_device_capability(device) < (8, 0):
        return None
    from hotloop.kernels.fuse import fused

    return fused(model, dtype)


def _compile_in_place(module: nn.Module, fused: Callable[..., Any] | None) -> None:
    """As `module.compile()`, which compiles nothing at all of an nn.Sequential: its frames are torch's own, and those
    the compiler leaves alone unless other code calls them.
    """
    if isinstance(module, FSDPModule):  # its hooks gather weights before and after: the compiler would stop there
        module.forward = torch.compile(module.forward, dynamic=False)
        return
    call: Callable[..., Any] = module._call_impl
    parts = list(module.modules())

    def call_module(*arguments: Any, **named: Any) -> Any:
        if fused is not None and all(part.training for part in parts):
            return fused(*arguments, **named)
        return call(*arguments, **named)

    module._compiled_call_impl = torch.compile(call_module, dynamic=False, options=_options() if fused else None)


def _options() -> dict[str, Any]:
    from hotloop.kernels.fuse import Passes, announce_to_compiler

    announce_to_compiler()
    # Combined: the many small casts and copies of a network's weights and running values in a few launches. A
    # ResNet-50's step for images of 32 pixels takes 3.18 ms with it and 3.40 ms without, on an H200.
    return {"post_grad_custom_post_pass": Passes(), "combo_kernels": True}


class Compiled:
    """A function compiled for fixed shapes; where it does not compile, that is said and it runs as it stands."""

    def __init__(self, function: Callable[..., Any], what: str, notify: Callable[[str], None]) -> None:
        self._function = function
        self._what = what
        self._notify = notify
        self._compiled = torch.compile(function, dynamic=False)
        _set_up_compiler()

    def __call__(self, *arguments: Any) -> Any:
        try:
            return self._compiled(*arguments)
        except compiler_errors() as error:
            found = self._function(*arguments)  # raises what is wrong with this batch, if that was the reason
            self._compiled = self._function
            self._notify(f"{self._what} does not compile and runs as it stands: {first_words(error)}")
            return found


def first_words(error: Exception) -> str:
    """Kind and first line of an error, whose message may be pages, or empty."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join([type(error).__name__, *lines[:1]])


def undo_compile(model: nn.Module) -> None:
    """Let a model run as it stands again."""
    for module in model.modules():
        module._compiled_call_impl = None
        if isinstance(module, FSDPModule):
            vars(module).pop("forward", None)


def without_compiler() -> AbstractContextManager[object]:
    """Run what is compiled as it stands in this block, so that a rare shape costs no compilation."""
    # Where its machinery was never loaded nothing is compiled, and loading it would take two seconds.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


class Breaks:
    """Why what is compiled from now on, in this process, is not one piece."""

    def __init__(self) -> None:
        self._before = _counted()

    def first(self) -> str:
        """A reason, or that nothing at all was compiled; empty if all is one piece."""
        graphs, breaks = _counted()
        if graphs <= self._before[0]:
            return "it found nothing to compile"
        # torch.optim breaks on purpose where its step begins.
        new = (reason for reason in breaks - self._before[1] if "User-inserted" not in reason)
        return " ".join(next(new, "").split())[:300]


def _counted() -> tuple[int, Counter[str]]:
    """Graphs, and breaks between them by reason, of the whole process."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"], Counter(counters["graph_break"])


def compiler_errors() -> tuple[type[Exception], ...]:
    """What a compilation that fails may raise."""
    if "torch._dynamo" not in sys.modules:
        return ()
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import InductorError

    return (TorchDynamoException, InductorError)
