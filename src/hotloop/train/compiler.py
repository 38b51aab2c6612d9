"""torch.compile: which part of a model, with what settings, and a cache that outlives the process."""

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hotloop.core.errors import InputError
from hotloop.train.blocks import repeated_blocks


def keep_compiled_code() -> None:
    """Let compiled kernels stay in the user's cache folder, so that the next run of the same job starts quickly.

    By default they go to /tmp, which a restart or another container empties. Before the first compilation.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hotloop" / "inductor"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))


def compile_model(model: nn.Module, how: str) -> None:
    """Compile a model in place, for fixed shapes.

    Args:
        how: "model": all of it at once, the fastest; "blocks": its repeated blocks, one compilation for all of them.

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
    for part in parts:
        _compile_in_place(part)


def _compile_in_place(module: nn.Module) -> None:
    """As `module.compile()`, which compiles nothing at all of an nn.Sequential: its frames are torch's own, and those
    the compiler leaves alone unless other code calls them.
    """
    call: Callable[..., Any] = module._call_impl

    def call_module(*arguments: Any, **named: Any) -> Any:
        return call(*arguments, **named)

    module._compiled_call_impl = torch.compile(call_module, dynamic=False)


def undo_compile(model: nn.Module) -> None:
    """Let a model run as it stands again."""
    for module in model.modules():
        module._compiled_call_impl = None


def without_compiler() -> AbstractContextManager[object]:
    """Run what is compiled as it stands in this block, so that a rare shape costs no compilation."""
    # Where its machinery was never loaded nothing is compiled, and loading it would take two seconds.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def first_break() -> str:
    """Why what was compiled in this process is not one piece, or nothing at all; empty if it is."""
    if "torch._dynamo" not in sys.modules:
        return ""
    from torch._dynamo.utils import counters

    if not counters["stats"]["unique_graphs"]:
        return "it found nothing to compile"
    # torch.optim breaks on purpose where its step begins.
    reason = next((reason for reason in counters["graph_break"] if "User-inserted" not in reason), "")
    return " ".join(reason.split())[:300]


def compiler_errors() -> tuple[type[Exception], ...]:
    """What a compilation that fails may raise."""
    if "torch._dynamo" not in sys.modules:
        return ()
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import InductorError

    return (TorchDynamoException, InductorError)
